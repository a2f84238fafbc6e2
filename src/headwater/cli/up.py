"""`headwater up`: starts, watches and stops a router and its instances together.

The cluster comes from a file (`-f`) or from flags. Every process is a `headwater serve` or
`headwater route`. A process that dies is started again with back-off. When this command itself
dies, its children end (`launch.parent_watch`).
"""

import os
import secrets
import shlex
import signal
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace, _SubParsersAction
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.security import TLS_FLAGS, add_tls_flags, commands_to_try, tls_of
from headwater.cli.values import add_command
from headwater.config import api_key_from_environment
from headwater.errors import ConfigError
from headwater.launch.hub import find_model
from headwater.launch.parent_watch import watch_parent

if TYPE_CHECKING:
    from headwater.cluster.members import Member
    from headwater.cluster.processes import ProcessSpec
    from headwater.cluster.spec import ClusterSpec, Role

_ABOUT = """\
Start a whole cluster: a router and instances that register at it. Flags of `headwater serve` may
follow after `--`. A cluster file has the same and more; docs/cluster.md describes it.

  headwater up --mixed 2
  headwater up --prefill 1 --decode 2 --model ./Llama-3.2-1B -- --max-model-len 8192
  headwater up --prefill 2 --decode 2 --model ./Llama-3.1-8B --gpus 0,1,2,3
  headwater up -f cluster.yaml
  headwater up -f cluster.yaml --dry-run
  headwater up -f cluster.yaml --ray

While it runs: headwater status, scale decode=4, drain NAME, restart, logs NAME, down.
"""


def add_up(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = add_command(
        commands,
        "up [-f FILE | --mixed N | --prefill N --decode N] [flags] [-- serve flags]",
        _ABOUT,
    )
    parser.add_argument("-f", "--file", metavar="FILE", type=Path, help="cluster file (YAML)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command lines and start nothing"
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of the cluster file"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="place instances on a Ray cluster (default: that of RAY_ADDRESS or this machine)",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="name of the cluster (default: one that is not in use)"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="model directory or Hugging Face name (default: built in)",
    )
    for role, what in (
        ("mixed", "number of instances that prefill and decode (default: 0)"),
        ("prefill", "number of instances that only prefill (default: 0)"),
        ("decode", "number of instances that decode (default: 0)"),
    ):
        parser.add_argument(f"--{role}", type=int, metavar="N", default=0, help=what)
    parser.add_argument(
        "--gpus",
        metavar="N,N,…",
        help="numbers of the GPUs, one for each instance, prefill instances first",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of the router (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=8100, help="port of the router (default: 8100)"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="key that clients must carry, for router and instances (or HEADWATER_API_KEY)",
    )
    parser.add_argument(
        "--instance-ports",
        metavar="FIRST[-LAST]",
        help="ports of the instances, counted up from FIRST (default: any free ports)",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        default="cache_aware",
        help="routing policy, see headwater route (default: cache_aware)",
    )
    parser.add_argument(
        "--restart",
        action=BooleanOptionalAction,
        default=True,
        help="restart processes that died (default: yes)",
    )
    add_tls_flags(parser)
    parser.add_argument(
        "serve_flags",
        nargs="*",
        metavar="-- FLAGS",
        help="flags of headwater serve for each instance",
    )
    parser.set_defaults(flags=[flag for a in parser._actions for flag in a.option_strings])


def run_up(options: Namespace) -> int:
    """Run the cluster until stopped; return the exit code."""
    from headwater.cluster.spec import read_spec, schema

    if options.schema:
        sys.stdout.write(schema().decode())
        return 0
    spec = read_spec(options.file) if options.file is not None else _spec_of_flags(options)
    if options.dry_run:
        return _dry_run(spec, options)
    if "--revision" not in options.serve_flags and options.ray is None:
        find_model(spec.model)  # downloaded once, and not by every instance
    if options.api_key is not None:
        os.environ["HEADWATER_API_KEY"] = options.api_key
    return _run(spec, options)


def _run(spec: "ClusterSpec", options: Namespace) -> int:
    from headwater.clock import SystemClock
    from headwater.cluster.control import ClusterFolder, ControlServer
    from headwater.cluster.host import LocalHost
    from headwater.cluster.supervisor import ClusterSupervisor

    name = options.name or (spec.name if options.file is not None else _free_name(spec.name))
    folder = ClusterFolder(name)
    folder.make()
    _share_token(spec, folder.token)
    local = LocalHost(folder.logs)
    instances = local if options.ray is None else _ray_host(spec, options.ray, folder.logs)
    spec = _named(spec, name, options)
    supervisor = ClusterSupervisor(
        spec,
        clock=SystemClock(),
        routers=local,
        instances=instances,
        say=_say,
        extra_flags=_extra_flags(options),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: supervisor.stop())
    watch_parent(os.environ)
    control = ControlServer(folder.socket, supervisor.ask)
    try:
        supervisor.run(lambda members: _say(_banner(spec, members, folder.token)))
    finally:
        control.close()
        for host in {id(local): local, id(instances): instances}.values():
            host.close()
        folder.token.unlink(missing_ok=True)
    return 0


def _ray_host(spec: "ClusterSpec", address: str, logs: Path) -> Any:  # noqa: ANN401 -- a Host
    from headwater.cluster.ray_host import RayHost

    return RayHost(spec.ray, address or spec.ray.address, logs)


def _free_name(wanted: str) -> str:
    """`wanted`, or the first of `wanted-2`, `wanted-3` … that no running cluster has."""
    from headwater.cluster.control import ClusterFolder, is_answered

    number = 1
    while True:
        name = wanted if number == 1 else f"{wanted}-{number}"
        if not is_answered(ClusterFolder(name).socket):
            return name
        number += 1


def _share_token(spec: "ClusterSpec", path: Path) -> None:
    """Put the secret of the cluster into the environment, from which children get it, and into
    a file for instances that are started by hand."""
    if spec.peer_token_file is None:
        os.environ.setdefault("HEADWATER_PEER_TOKEN", secrets.token_hex(16))
        path.touch(mode=0o600)
        path.write_text(os.environ["HEADWATER_PEER_TOKEN"] + "\n", encoding="ascii")


def _named(spec: "ClusterSpec", name: str, options: Namespace) -> "ClusterSpec":
    import msgspec

    from headwater.cluster.spec import RestartSpec

    restart = spec.restart if options.restart else RestartSpec(max_restarts=0)
    return msgspec.structs.replace(spec, name=name, restart=restart)


def _spec_of_flags(options: Namespace) -> "ClusterSpec":
    """The cluster that the flags describe."""
    from headwater.cluster.spec import ROLES, ClusterSpec, RoleSpec, RouterSpec, TlsSpec

    roles: dict[Role, int] = {role: getattr(options, role) for role in ROLES}
    num_instances = sum(roles.values())
    _check(roles)
    tls_of(options)  # wrong or missing TLS files are reported before anything starts
    gpus = _gpus(options, num_instances)
    _ports(options, num_instances)
    files = {name.removeprefix("ssl_"): getattr(options, name) for name in TLS_FLAGS}
    tls = TlsSpec(**files) if files["certfile"] is not None else None
    return ClusterSpec(
        model=options.model,
        roles={role: RoleSpec(count=count) for role, count in roles.items() if count},
        gpus_per_instance=1 if gpus else 0,
        gpus=gpus,
        routers=RouterSpec(host=options.host, port=options.port, policy=options.policy),
        tls=tls,
    )


def _extra_flags(options: Namespace) -> "Callable[[int], list[str]]":
    """Further command line arguments of the n-th instance, from 0."""
    total = options.mixed + options.prefill + options.decode
    ports = _ports(options, total)

    def words(number: int) -> list[str]:
        port = ports[number] if number < len(ports) else 0
        return [*(["--port", str(port)] if port else []), *options.serve_flags]

    return words


def _dry_run(spec: "ClusterSpec", options: Namespace) -> int:
    """Print every command line, checked by the real parser."""
    from headwater.cluster.processes import instance_names, instance_process, router_processes

    routers = router_processes(spec)
    scheme = "http" if spec.tls is None else "https"
    urls = [
        f"{scheme}://{spec.routers.host}:{spec.routers.port + n}" for n in range(len(routers))
    ]
    extra = _extra_flags(options)
    instances = [
        instance_process(spec, role, number, routers=urls, extra=extra(at))
        for at, (role, number) in enumerate(instance_names(spec))
    ]
    for process in (*routers, *instances):
        _check_process(process)
        sys.stdout.write(f"{process.name}: {shlex.join(('headwater', *process.arguments))}\n")
    if options.ray is not None:
        from headwater.cluster.placement import describe_policy, describe_request

        for process in instances:
            sys.stdout.write(describe_request(process, spec.ray) + "\n")
        sys.stdout.write(describe_policy(spec.ray) + "\n")
    return 0


def _check_process(process: "ProcessSpec") -> None:
    """Raise ConfigError if a flag of `process` does not exist or has a wrong value."""
    import contextlib
    import io

    from headwater.cli.parser import build_parser

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            _, unknown = build_parser().parse_known_args(list(process.arguments))
    except SystemExit:
        unknown = [errors.getvalue().strip().rpartition("error: ")[2]]
    if unknown:
        raise ConfigError(
            f"{process.name}: {' '.join(unknown)} is not a valid flag or value; see its --help"
        )


def _check(roles: "dict[Role, int]") -> None:
    if min(roles.values()) < 0 or not sum(roles.values()):
        raise ConfigError(
            "say how many instances: --mixed N, or --prefill N --decode N, or -f FILE"
        )
    if bool(roles["prefill"]) and not roles["decode"]:
        raise ConfigError(
            "--prefill instances need --decode instances to hand over to; give --decode N"
        )


def _gpus(options: Namespace, num_instances: int) -> list[int]:
    """The GPUs of the instances; empty if none are given."""
    if options.gpus is None:
        return []
    gpus = options.gpus.split(",")
    if len(gpus) != num_instances or not all(gpu.isdigit() for gpu in gpus):
        raise ConfigError(
            f"--gpus {options.gpus}: give one GPU number for each of the {num_instances} instances, "
            "with commas between them; one GPU may be named twice if --gpu-memory-utilization "
            "leaves room"
        )
    if any(flag.partition("=")[0] == "--device" for flag in options.serve_flags):
        raise ConfigError("--gpus and --device both say where instances run: leave one out")
    return [int(gpu) for gpu in gpus]


def _ports(options: Namespace, num_instances: int) -> list[int]:
    """The port of each instance; 0 means any free port."""
    if options.instance_ports is None:
        return [0] * num_instances
    first, dash, last = options.instance_ports.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise ConfigError(
            f"--instance-ports {options.instance_ports}: give one port, as 8200, or a range, as "
            "8200-8210"
        )
    ports = list(range(int(first), int(first) + num_instances))
    if ports[-1] > (int(last) if dash else 65535) or not ports[0]:
        raise ConfigError(
            f"--instance-ports {options.instance_ports} has too few ports for {num_instances} instances; give a longer range"
        )
    return ports


def _banner(spec: "ClusterSpec", members: "Sequence[Member]", token: Path) -> str:
    name = spec.name
    routers = [member for member in members if member.process.is_router]
    url = routers[0].url
    has_key = api_key_from_environment() is not None
    curl, top, heading = commands_to_try(
        url,
        needs_key=has_key or spec.api_keys_file is not None,
        ca_certs=None if spec.tls is None else spec.tls.ca_certs,
    )
    width = max(len(member.name) for member in members)
    lines = "".join(
        f"\n  {member.name:<{width}}  {member.url}  "
        f"{'' if member.running is None else member.running.place}"
        for member in members
    )
    cluster = "" if name == "default" else f" --cluster {name}"
    return f"""\
Headwater cluster is ready at {url}{lines}
{heading}
  {curl} {url}/v1/chat/completions -d '{{"messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 20}}'
  {curl} {url}/instances
  {top}
  headwater status{cluster}
  {url}/dashboard in a browser
add or replace an instance{", with the same HEADWATER_API_KEY" if has_key else ""}:
  {shlex.join(_by_hand(members, token))}
stop with Ctrl-C or headwater down{cluster}"""


def _by_hand(members: "Sequence[Member]", token: Path) -> list[str]:
    """The command that adds an instance like the last one."""
    words = list(members[-1].process.arguments)
    for flag in ("--instance-name", "--port"):
        while flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    return ["headwater", *words, "--port", "0", "--peer-token-file", str(token)]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
