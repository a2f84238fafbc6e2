"""`headwater plan`: which size of each tier is worth its price, for a recorded trace."""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from headwater.cli.machine_flags import add_machine, sim_config
from headwater.cli.replay import ROUTERS, add_load, add_slo, cluster, load_of
from headwater.cli.values import add_command
from headwater.config import EVICTIONS, LOAD_POLICIES, WRITE_POLICIES
from headwater.errors import ConfigError

_ABOUT = """\
Replay a trace on every combination of tier sizes, policies and instance counts, on all cores, and
compare: what one more TiB of each tier gains in hits, time to the first token and throughput, and
which deployments are better than every cheaper one. The last line is the verdict in one sentence.

  headwater plan trace.jsonl --slo ttft_p99=2s --device-gib 60,120 --host-gib 0,256,1024
  headwater plan trace.jsonl --instances 8 --pd 2:6,3:5,4:4 --slo ttft_p99=2s,itl_p99=50ms
  headwater plan trace.jsonl --instances 4,6,8 --storage-gib 0,8192 --host-gib 0,512 \\
      --price instance=2500,host=2.5,storage=0.08 --picture out/

Lists are tried in all combinations; storage without a host tier is left out. Try a part of a
long trace first: --limit 2000, or --scale 0.25 on a quarter of the instances.
docs/sizing.md explains the result and its limits.
"""

T = TypeVar("T")


def add_plan(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = add_command(commands, "plan TRACE [flags]", _ABOUT)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="trace or recording")
    _add_sweep(parser)
    add_load(parser.add_argument_group("load"))
    add_machine(parser.add_argument_group("machine"))
    add_slo(parser.add_argument_group("latency target"))
    group = parser.add_argument_group("work and output")
    group.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="replays that run at the same time (default: one per core)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument(
        "--picture",
        type=Path,
        metavar="DIR|FILE",
        help="draw hits and the time to the first token by size of each tier: a .png or .svg file, or "
        "both in a folder",
    )
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(flags=flags)


def run_plan(options: Namespace) -> int:
    """Run all combinations, print the result, and return the exit code."""
    from headwater.engine.progress import SilentProgress, show_progress
    from headwater.replay.charts import check_picture
    from headwater.replay.plan import Grid, make_plan
    from headwater.replay.plan_charts import draw_plan
    from headwater.replay.plan_report import plan_table
    from headwater.replay.prices import parse_prices
    from headwater.replay.slo import parse_slo

    grid = Grid(
        device_gib=_listed("--device-gib", options.device_gib, float) or [None],
        host_gib=_listed("--host-gib", options.host_gib, float),
        storage_gib=_listed("--storage-gib", options.storage_gib, float),
        clusters=_clusters(options),
        eviction=_names("--eviction", options.eviction, EVICTIONS),
        write_policy=_names("--write-policy", options.write_policy, WRITE_POLICIES),
        load_policy=_names("--load-policy", options.load_policy, LOAD_POLICIES),
    )
    configs = grid.configs(sim_config(options, router=options.router))
    bounds, prices = parse_slo(options.slo), parse_prices(options.price)
    if options.picture is not None:
        check_picture(options.picture)
    load = load_of(options)
    load.requests()  # reports an unreadable trace once, instead of in every process
    num_jobs = options.jobs or len(os.sched_getaffinity(0))
    start = time.perf_counter()
    show = show_progress if sys.stderr.isatty() else lambda *_: SilentProgress()
    with show("plan", len(configs)) as progress:
        plan = make_plan(
            configs, load, bounds, prices, num_jobs=num_jobs, advance=progress.advance
        )
    plan["wall_s"] = time.perf_counter() - start
    if options.picture is not None:  # first: the verdict is the last line
        for path in draw_plan(plan, options.picture):
            sys.stderr.write(f"wrote {path}\n")
    sys.stdout.write(json.dumps(plan) + "\n" if options.json else plan_table(plan))
    return 0


def _listed(flag: str, text: str | None, kind: Callable[[str], T]) -> list[T]:
    """The values of a flag, each once, in the given order."""
    if text is None:
        return []
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError as exc:
        raise ConfigError(f"{flag} must be a list such as 0,256,1024; got {text!r}") from exc
    return list(dict.fromkeys(values))


def _clusters(options: Namespace) -> list[tuple[int, int]]:
    """Clusters of equal instances, and clusters of two roles."""
    texts = _listed("--instances", options.instances, str) + _listed("--pd", options.pd, str)
    made = [cluster(text) for text in texts or ["1"]]
    return [(one["num_instances"], one["num_prefill"]) for one in made]


def _names(flag: str, text: str, valid: Sequence[str]) -> list[str]:
    names = _listed(flag, text, str)
    for name in names:
        if name not in valid:
            raise ConfigError(f"{flag} must be one of {', '.join(valid)}; got {name!r}")
    return names


def _add_sweep(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("values to try (lists, in all combinations)")
    group.add_argument(
        "--device-gib",
        metavar="GIB,GIB",
        help="device memory for KV of each instance (default: that of the machine)",
    )
    group.add_argument(
        "--host-gib",
        metavar="GIB,GIB",
        default="0",
        help="host tier of each instance (default: %(default)s)",
    )
    group.add_argument(
        "--storage-gib",
        metavar="GIB,GIB",
        default="0",
        help="storage that all instances share (default: %(default)s)",
    )
    group.add_argument(
        "--instances",
        metavar="N,N",
        help="number of equal instances (default: 1, without --pd)",
    )
    group.add_argument(
        "--pd", metavar="P:D,P:D", help="numbers of prefill and decode instances"
    )
    group.add_argument(
        "--eviction",
        metavar="NAME,NAME",
        default="lru",
        help=f"eviction policies, some of {', '.join(EVICTIONS)} (default: %(default)s)",
    )
    group.add_argument(
        "--write-policy",
        metavar="NAME,NAME",
        default="auto",
        help=f"write policies, some of {', '.join(WRITE_POLICIES)} (default: %(default)s)",
    )
    group.add_argument(
        "--load-policy",
        metavar="NAME,NAME",
        default="priced",
        help=f"load policies, some of {', '.join(LOAD_POLICIES)} (default: %(default)s)",
    )
    group.add_argument(
        "--router",
        choices=ROUTERS,
        default=ROUTERS[0],
        help="routing policy (default: %(default)s)",
    )
    group.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=X",
        help="price of an instance, or of a GiB of device, host or storage; several with commas",
    )
