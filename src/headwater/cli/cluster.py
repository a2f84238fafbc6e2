"""Commands for a running cluster: status, scale, drain, restart, logs, down."""

import json
import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError

VERBS = ("status", "scale", "drain", "restart", "logs", "down")
_COLUMNS = ("name", "state", "url", "place", "restarts", "last_exit")


def add_cluster_commands(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add all commands of this module."""
    parsers = {verb: _add(commands, verb) for verb in VERBS}
    parsers["status"].add_argument("--json", action="store_true", help="print one JSON object")
    parsers["scale"].add_argument(
        "roles",
        nargs="+",
        metavar="ROLE=N",
        help="number of instances of a role, for example decode=4",
    )
    parsers["drain"].add_argument(
        "member", metavar="NAME", help="instance to drain, for example decode-2"
    )
    parsers["restart"].add_argument(
        "members",
        nargs="*",
        metavar="NAME",
        help="instances to restart (default: all that were not drained by hand)",
    )
    parsers["restart"].add_argument(
        "-f", "--file", type=Path, metavar="FILE", help="cluster file with the new flags"
    )
    parsers["logs"].add_argument(
        "member",
        metavar="NAME",
        help="process whose log to print, for example router or decode-1",
    )
    parsers["logs"].add_argument(
        "-n",
        "--lines",
        type=int,
        default=200,
        metavar="N",
        help="number of last lines to print (default: 200)",
    )
    for parser in parsers.values():
        parser.set_defaults(flags=[flag for a in parser._actions for flag in a.option_strings])


def _add(commands: "_SubParsersAction[ArgumentParser]", verb: str) -> ArgumentParser:
    about = {
        "status": "List the processes of a running cluster.",
        "scale": "Start or drain instances until a role has the given number.",
        "drain": "Let an instance finish its requests and end. It stays down.",
        "restart": "Restart instances one after the other; running requests finish first.",
        "logs": "Print the log of a process of a cluster.",
        "down": "Stop a cluster and wait for its end: instances finish their requests first.",
    }
    parser = commands.add_parser(verb, description=about[verb], allow_abbrev=False)
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="name of the cluster (default: the only one that runs)",
    )
    return parser


def run_cluster(options: Namespace) -> int:
    """Send the command to the running cluster and return the exit code."""
    from headwater.cluster.control import ask_cluster, wait_until_ended

    options.cluster = options.cluster or _only_cluster()
    if options.command == "logs":
        return _logs(options)
    answer = ask_cluster(options.cluster, options.command, _arguments(options))
    if options.command == "down":
        sys.stdout.write(f"cluster {answer['name']} is stopping\n")
        sys.stdout.flush()
        wait_until_ended(options.cluster)  # so that the next `up` finds its name and ports free
        sys.stdout.write(f"cluster {answer['name']} has ended\n")
    elif getattr(options, "json", False):
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        sys.stdout.write("\n".join(_table(answer["members"])) + "\n")
    return 0


def _only_cluster() -> str:
    """The cluster to which a command without a name is sent. Raises ConfigError when several
    run, so that no command reaches the wrong one."""
    from headwater.cluster.control import running_clusters

    running = running_clusters()
    if len(running) > 1:
        raise ConfigError(
            f"{len(running)} clusters are running: {', '.join(running)}; choose one with "
            "--cluster NAME"
        )
    return running[0] if running else "default"


def _arguments(options: Namespace) -> dict[str, Any]:
    if options.command == "scale":
        return {"roles": dict(_role(text) for text in options.roles)}
    if options.command == "drain":
        return {"name": options.member}
    if options.command == "restart":
        new = {} if options.file is None else {"spec": _new_spec(options)}
        return {"names": options.members, **new}
    return {}


def _new_spec(options: Namespace) -> Any:  # noqa: ANN401 -- plain values for JSON
    import msgspec

    from headwater.cluster.spec import read_spec

    spec = msgspec.structs.replace(read_spec(options.file), name=options.cluster)
    return msgspec.to_builtins(spec)


def _role(text: str) -> tuple[str, int]:
    role, _, count = text.partition("=")
    if not count.isdigit():
        raise ConfigError(f"{text!r} is not ROLE=COUNT; write for example decode=4")
    return role, int(count)


def _table(members: list[dict[str, Any]]) -> Iterator[str]:
    rows = [list(_COLUMNS), *([str(member[c]) for c in _COLUMNS] for member in members)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    for row in rows:
        yield "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()


def _logs(options: Namespace) -> int:
    from headwater.cluster.control import ClusterFolder

    folder = ClusterFolder(options.cluster).logs
    path = folder / f"{options.member}.log"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in folder.glob("*.log"))) or "none"
        raise ConfigError(f"there is no log of {options.member!r}; there are logs of: {known}")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    sys.stdout.write("\n".join(lines[-options.lines :]) + "\n")
    return 0
