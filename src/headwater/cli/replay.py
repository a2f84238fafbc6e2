"""`headwater replay`: serves a recorded trace with the real engine on a virtual clock."""

import json
import sys
import time
from argparse import ArgumentParser, Namespace, _ArgumentGroup, _SubParsersAction
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli.machine_flags import add_machine, sim_config
from headwater.cli.values import add_command
from headwater.config import EVICTIONS, LOAD_POLICIES, WRITE_POLICIES
from headwater.errors import ConfigError

if TYPE_CHECKING:
    from headwater.replay.workload import TraceLoad

_ABOUT = """\
Send the requests of a trace to the real scheduler, cache and transfer decisions on a virtual
clock: a cost model says how long steps and copies take, and nothing is computed. An hour of traffic
takes seconds, needs no GPU, and gives the same result each time.

TRACE is JSON lines in the Mooncake format (timestamp in ms, input_length, output_length,
hash_ids of 512 tokens each), or what `headwater serve --record FILE` wrote.

  headwater replay trace.jsonl
  headwater replay trace.jsonl --host-gib 512 --storage-gib 4096 --slo ttft_p99=2s,itl_p99=80ms
  headwater replay trace.jsonl --instances 8 --router cache_aware --json
  headwater replay trace.jsonl --pd 2:6 --slo ttft_p99=2s,itl_p99=50ms
  headwater replay trace.jsonl --picture out/
  headwater replay trace.jsonl --cache-only --capacity-blocks 10000 --eviction opt

docs/replay.md explains what is modelled and what is not.
"""

ROUTERS = ("cache_aware", "least_load", "round_robin")


def add_replay(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = add_command(commands, "replay TRACE [flags]", _ABOUT)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="trace or recording")
    add_load(parser.add_argument_group("load"))
    add_machine(parser.add_argument_group("machine"))
    _add_tiers(parser.add_argument_group("tiers and instances"))
    policies = parser.add_argument_group("policies")
    _add_policies(policies)
    add_slo(policies)
    _add_cache_only(parser.add_argument_group("the cache alone"))
    _add_output(parser.add_argument_group("output"))
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(flags=flags)


def add_load(group: _ArgumentGroup) -> None:
    """Add the flags for the requests and their speed."""
    group.add_argument("--limit", type=int, metavar="N", help="use only the first N requests")
    group.add_argument(
        "--speed",
        type=float,
        metavar="X",
        default=1.0,
        help="factor on the arrival rate: the same requests in 1/X of the time (default: %(default)g)",
    )
    group.add_argument(
        "--scale",
        type=float,
        metavar="X",
        default=1.0,
        help="factor on the number of sessions: below 1 a random part, above 1 with copies (default: %(default)g)",
    )
    group.add_argument(
        "--seed", type=int, default=1, help="seed of the random choice of --scale (default: 1)"
    )


def _add_policies(group: _ArgumentGroup) -> None:
    """Add the flags for policies."""
    group.add_argument(
        "--write-policy",
        choices=WRITE_POLICIES,
        default="auto",
        help="when a block is written to the host tier (default: %(default)s)",
    )
    group.add_argument(
        "--load-policy",
        choices=LOAD_POLICIES,
        default="priced",
        help="load blocks from lower tiers, or compute them again (default: %(default)s)",
    )


def add_slo(group: _ArgumentGroup) -> None:
    """Add the flag for the bounds on latencies."""
    group.add_argument(
        "--slo",
        default="",
        metavar="BOUNDS",
        help="bounds on latencies, such as ttft_p99=2s,itl_p99=50ms; the report then has the goodput",
    )


def load_of(options: Namespace) -> "TraceLoad":
    """The requests that the flags of `add_load` select."""
    from headwater.replay.workload import TraceLoad

    return TraceLoad(
        trace=options.trace,
        limit=options.limit,
        speed=options.speed,
        scale=options.scale,
        seed=options.seed,
    )


def cluster(text: str) -> dict[str, int]:
    """Parses `4` (equal instances) or `1:3` (prefill and decode instances)."""
    first, colon, second = text.partition(":")
    try:
        prefill, others = (int(first), int(second)) if colon else (0, int(first))
    except ValueError as exc:
        raise ConfigError(f"--pd must be two numbers such as 1:3, got {text!r}") from exc
    if colon and (prefill < 1 or others < 1):
        raise ConfigError(f"--pd {text} leaves out a role: give at least 1:1")
    return {"num_instances": prefill + others, "num_prefill": prefill}


def run_replay(options: Namespace) -> int:
    """Run the replay, print the report, and return the exit code."""
    if options.cache_only:
        return _run_cache_only(options)
    if options.eviction == "opt":
        raise ConfigError(
            "--eviction opt needs the whole trace in advance: use it with --cache-only"
        )
    if options.capacity_blocks is not None:
        raise ConfigError(
            "--capacity-blocks works only with --cache-only; give --device-gib instead"
        )
    if (options.weights, options.save_weights) != ("none", None):
        raise ConfigError(
            "--weights and --save-weights work only with --cache-only; add it or leave them out"
        )
    return _run_engine(options)


def _run_engine(options: Namespace) -> int:
    from headwater.engine.collector import settle_collector
    from headwater.engine.progress import SilentProgress, show_progress
    from headwater.replay.charts import check_picture, draw_report
    from headwater.replay.hints import with_hints
    from headwater.replay.report import make_report
    from headwater.replay.simulator import Simulator
    from headwater.replay.slo import parse_slo
    from headwater.replay.text_report import report_table

    bounds = parse_slo(options.slo)
    config = sim_config(
        options,
        device_gib=options.device_gib,
        host_gib=options.host_gib,
        storage_gib=options.storage_gib,
        **cluster(options.pd or str(options.instances)),
        prefill_threshold=options.prefill_threshold,
        router=options.router,
        eviction=options.eviction,
        write_policy=options.write_policy,
        load_policy=options.load_policy,
        fast_forward=not options.step_by_step,
        storage_order=options.storage_order,
    )
    if options.picture is not None:
        check_picture(options.picture)
    requests = with_hints(load_of(options).requests(), options.hints)
    simulator = Simulator(config, requests)
    settle_collector()
    start = time.perf_counter()
    show = show_progress if sys.stderr.isatty() else lambda *_: SilentProgress()
    with show("replay", len(requests)) as progress:
        run = simulator.run(progress.advance)
    report = make_report(run, bounds) | {"wall_s": time.perf_counter() - start}
    sys.stdout.write(json.dumps(report) + "\n" if options.json else report_table(report))
    if options.picture is not None:
        for path in draw_report(report, options.picture):
            sys.stderr.write(f"wrote {path}\n")
    return 0


def _run_cache_only(options: Namespace) -> int:
    from headwater.launch.weights import load_weights, save_learned
    from headwater.replay.cache_only import replay_cache, replay_optimum
    from headwater.replay.trace import TRACE_BLOCK

    weights = load_weights(options.weights)
    if options.save_weights is not None and options.eviction != "session":
        raise ConfigError(
            "--save-weights needs --eviction session: no other policy learns weights"
        )
    requests = load_of(options).requests()
    if requests[0].block_tokens != TRACE_BLOCK:
        raise ConfigError(
            "--cache-only is for traces in the Mooncake format; leave it out for recordings"
        )
    start = time.perf_counter()
    if options.eviction == "opt":
        replayed = replay_optimum(requests, options.capacity_blocks)
    else:
        replayed = replay_cache(
            requests,
            options.capacity_blocks,
            eviction=options.eviction,
            weights=weights,
            hints=options.hints,
        )
    if options.save_weights is not None and replayed.learned is not None:
        save_learned(
            replayed.learned, options.save_weights, before=weights, trace=options.trace
        )
    result = {
        "requests": replayed.requests,
        "block_hit": replayed.block_hit,
        "token_hit": replayed.token_hit,
        "misses_by_reason": replayed.misses_by_reason,
        "wall_s": time.perf_counter() - start,
    }
    sys.stdout.write(json.dumps(result) + "\n" if options.json else _table(result))
    return 0


def _table(result: dict[str, object]) -> str:
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            lines += [f"  {name} {reason:<22} {count:>10,}" for reason, count in value.items()]
        elif isinstance(value, float):
            lines.append(f"  {name:<39} {value:>10.4f}")
        else:
            lines.append(f"  {name:<39} {value:>10,}")
    return "\n".join(["headwater replay --cache-only", *lines, ""])


def _add_tiers(group: _ArgumentGroup) -> None:
    tiers: dict[str, tuple[str, float | None]] = {
        "--device-gib": (
            "device memory for KV of each instance (default: that of the machine)",
            None,
        ),
        "--host-gib": ("host tier of each instance; 0 means no host tier (default: 0)", 0.0),
        "--storage-gib": (
            "storage that all instances share; 0 means no storage (default: 0)",
            0.0,
        ),
    }
    for flag, (text, size) in tiers.items():
        group.add_argument(flag, type=float, metavar="GIB", default=size, help=text)
    group.add_argument(
        "--instances",
        type=int,
        metavar="N",
        default=1,
        help="number of equal instances (default: 1)",
    )
    group.add_argument(
        "--pd",
        metavar="P:D",
        help="P prefill and D decode instances, instead of --instances",
    )
    group.add_argument(
        "--prefill-threshold",
        type=int,
        metavar="TOKENS",
        default=256,
        help="with --pd: uncached tokens up to which a decode instance computes a prompt itself "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--router",
        choices=ROUTERS,
        default=ROUTERS[0],
        help="routing policy (default: %(default)s)",
    )
    group.add_argument(
        "--eviction",
        choices=(*EVICTIONS, "opt"),
        default="lru",
        help="which blocks are evicted first; opt knows the future, for --cache-only "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--storage-order",
        choices=("reuse", "arrival"),
        default="reuse",
        help="write first to storage the blocks most likely to be used again, or those that came first "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--hints",
        choices=("none", "perfect"),
        default="none",
        help="hints that clients send: none, or in each request whether its session continues "
        "(default: %(default)s)",
    )


def _add_cache_only(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--cache-only",
        action="store_true",
        help="simulate only the cache, one request after the other: no time, no engine, each "
        "hash id is one block, and requests generate no tokens",
    )
    group.add_argument(
        "--capacity-blocks",
        type=int,
        metavar="N",
        help="size of the cache in blocks of the trace (default: no limit)",
    )
    group.add_argument(
        "--weights",
        metavar="none|shipped|FILE",
        default="none",
        help="initial weights of --eviction session (default: %(default)s)",
    )
    group.add_argument(
        "--save-weights",
        type=Path,
        metavar="FILE",
        help="file for the weights that --eviction session has learned",
    )


def _add_output(group: _ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument(
        "--picture",
        type=Path,
        metavar="DIR|FILE",
        help="draw hits, times to the first token, tiers and queue: a .png or .svg file, or both "
        "in a folder",
    )
    group.add_argument(
        "--step-by-step",
        action="store_true",
        help="run every step, including those that decide nothing: slower, same result",
    )
