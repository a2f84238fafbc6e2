"""`headwater bench tiers`: the cost of host and storage tiers, and the time that a hit saves.

The parts are:

- traffic that never hits, with and without tiers, alternately
- the time to the first token of a hit in each tier, and of computing the same prompt
- many requests at once for one stored prefix
- bytes per second of each backend, divided by those of the simplest use of its medium
- the time to the first token while the backend is stopped and its breaker is open, divided by
  that of an engine without storage
- sessions that do not fit on the device: the share of the possible hits that each turn finds
- a simulated grid: first tokens with priced loads, divided by the better of two fixed policies
- the same grid on the built-in model, in real time
- with --trace: hits when storage accepts a quarter of what is computed, by order of writes

The engine runs in this process. Backends whose server is not installed are left out.
"""

import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from headwater.bench._backend_speed import measure_backends
from headwater.bench._flags import read_flags
from headwater.bench._hung_storage import CALLS, HungWorkload, measure_hung
from headwater.bench._report import print_report
from headwater.bench._stopped_media import BACKENDS
from headwater.bench._storage_media import Media, open_media
from headwater.bench._storage_order import measure_storage_order
from headwater.bench._tier_engine import TierEngine, TierRun, thread_ms
from headwater.bench._tier_pricing import measure_pricing
from headwater.bench._tier_pricing_live import live_scenarios, measure_live_pricing
from headwater.bench._tier_sessions import measure_sessions
from headwater.config import EVICTIONS
from headwater.errors import ConfigError
from headwater.types import Tokens

_CAPACITY_BYTES = 2 << 30
_TOGETHER = 50
_PARTS = (
    "backends",
    "hits",
    "convoy",
    "all-miss",
    "hung",
    "sessions",
    "pricing",
    "pricing-live",
)
_TRACE_PARTS = ("storage-order",)
_MISS_KEYS = {"control": "_control", "default": "", "write_through": "_write_through"}
"""Engines that are compared with one without tiers, and the suffixes of their figures."""

Result = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run the chosen parts and print a table or JSON."""
    options = read_flags(_parser(), argv)
    if options.quick:
        options.lengths, options.rounds, options.blocks = [256, 512], 2, 16
        options.backends, options.hung_calls = ["memory"], ["contains", "write"]
        options.live_cells = ["file/256/idle/slow"]
    options.folder = _model(options)
    result: Result = {}
    with tempfile.TemporaryDirectory(prefix="headwater-tiers-", dir=options.dir) as name:
        folder = Path(name)
        with open_media(folder, capacity_bytes=_CAPACITY_BYTES) as media:
            if "backends" in options.parts:
                _say(f"backends: {', '.join(media)}")
                result |= measure_backends(
                    media, folder, rounds=options.rounds, blocks=options.blocks
                )
            if "hits" in options.parts:
                result |= measure_hits(media, options)
            if "convoy" in options.parts:
                result |= _measure_convoy(media, options)
        if "all-miss" in options.parts:
            result |= measure_all_miss(folder / "all-miss", options)
    if "hung" in options.parts:
        result |= _measure_hung(options)
    if "sessions" in options.parts:
        result |= _measure_sessions(options)
    if "pricing" in options.parts:
        result |= measure_pricing(quick=options.quick, say=_say)
    if "pricing-live" in options.parts:
        result |= _measure_live_pricing(options)
    if "storage-order" in options.parts:
        result |= _measure_storage_order(options)
    print_report("headwater bench tiers", result, as_json=options.json)
    return 0


def measure_hits(media: Media, options: Namespace) -> Result:
    """`hit_ttft_ms` by tier and length, `recompute_ttft_ms` by length."""
    chosen = ["file"]
    engine = TierEngine(
        **_settings(options),
        write_policy="write_through",
        load_policy="wait",
        storage_backend="headwater.bench._switch:Switch",
        storage_config={"media": media, "chosen": chosen},
    )
    hits: dict[str, dict[str, float]] = {tier: {} for tier in ("host", *media)}
    computed: dict[str, float] = {}
    for length in options.lengths:
        _say(f"hits: {length} tokens")
        prompt, seconds = _compute(engine, length, options.rounds)
        computed[str(length)] = 1e3 * seconds
        for tier in hits:
            chosen[0] = tier if tier in media else "file"
            hits[tier][str(length)] = 1e3 * _hit_s(engine, prompt, tier, options.rounds)
    engine.close()
    faster = {
        tier: {length: computed[length] / ms for length, ms in row.items()}
        for tier, row in hits.items()
    }
    return {"hit_ttft_ms": hits, "recompute_ttft_ms": computed, "recompute_over_hit": faster}


def _measure_convoy(media: Media, options: Namespace) -> Result:
    """`convoy_ratio`: requests per second of a group with one stored prefix, divided by those
    of a group that computes the prefix."""
    engine = TierEngine(
        **_settings(options),
        write_policy="write_through",
        storage_backend="file",
        storage_config=media["file"],
    )
    length, ratios = options.lengths[0], []
    for number in range(options.rounds):
        _say(f"convoy: round {number + 1} of {options.rounds}")
        prefix = engine.make_prompt(length, seed=10_000 + number)
        tails = [engine.make_prompt(8, seed=n) for n in range(_TOGETHER)]
        prompts = [np.concatenate((prefix, tail)) for tail in tails]
        computed = engine.serve(prompts, max_tokens=2)
        engine.drain()
        engine.core.reset_cache()
        stored = engine.serve(prompts, max_tokens=2)
        engine.drain()
        ratios.append(computed.seconds / stored.seconds)
    engine.close()
    return {"convoy_ratio": median(ratios), "convoy_found_tokens": stored.found}


def measure_all_miss(folder: Path, options: Namespace) -> Result:
    """`all_miss_loss`: the share of throughput that tiers cost if nothing ever hits.

    Engines with the same weights serve the same prompts alternately. `control` is a second
    engine without tiers: its loss is the noise of this machine. `cpu` figures are processor time
    with all threads, `thread_ms` that of each thread; other processes disturb them least.
    """
    engines = _miss_engines(folder, options)
    runs: dict[str, list[TierRun]] = {name: [] for name in engines}
    for number in range(options.pairs + 1):
        _say(f"all-miss: pair {number} of {options.pairs}")
        for name in list(engines) if number % 2 else reversed(engines):
            engine = engines[name]
            first = 100_000 + 10 * number
            prompts = [
                engine.make_prompt(options.miss_tokens, seed=first + n) for n in range(4)
            ]
            runs[name].append(engine.serve(prompts, max_tokens=8))
    for engine in engines.values():
        engine.close()
    result: Result = {"all_miss_pairs": options.pairs}
    for name, key in _MISS_KEYS.items():
        pairs = list(zip(runs["none"], runs[name], strict=True))[1:]  # the first warms up
        losses = [1 - without.seconds / tiered.seconds for without, tiered in pairs]
        cpu = [1 - without.cpu_s / tiered.cpu_s for without, tiered in pairs]
        result |= _summary(f"all_miss_loss{key}", losses)
        result |= _summary(f"all_miss_cpu_loss{key}", cpu)
    for field in ("decide_us", "decide_p50_us", "decide_cpu_us"):
        result[field] = {
            name: median(getattr(run, field) for run in runs[name][1:]) for name in runs
        }
    return result | {"thread_ms": {name: thread_ms(runs[name][1:]) for name in runs}}


def _measure_hung(options: Namespace) -> Result:
    from headwater.device.model import load

    work = HungWorkload(
        model=load(str(options.folder)),
        settings=_settings(options) | {"swap_space_gib": 0.25},
        num_prompts=20 if options.quick else options.hung_prompts,
        num_tokens=options.miss_tokens,
    )
    with tempfile.TemporaryDirectory(prefix="headwater-hung-", dir=options.dir) as folder:
        return measure_hung(
            work, Path(folder), backends=options.backends, calls=options.hung_calls, say=_say
        )


def _measure_sessions(options: Namespace) -> Result:
    from headwater.device import builtin
    from headwater.device.model import load

    folder = str(builtin.ensure())
    rounds = 1 if options.quick else 3
    return measure_sessions(
        load(folder), folder, eviction=options.eviction, rounds=rounds, say=_say
    )


def _measure_live_pricing(options: Namespace) -> Result:
    from headwater.device import builtin
    from headwater.device.model import load

    model = str(builtin.ensure())
    with tempfile.TemporaryDirectory(prefix="headwater-live-", dir=options.dir) as folder:
        return measure_live_pricing(
            load(model),
            {"model": model},
            Path(folder),
            scenarios=[live_scenarios()[name] for name in options.live_cells],
            rounds=options.rounds,
            say=_say,
        )


def _measure_storage_order(options: Namespace) -> Result:
    if options.trace is None:
        raise ConfigError("--parts storage-order needs --trace FILE")
    limit = 200 if options.quick else options.requests
    return measure_storage_order(options.trace, limit=limit, hints="perfect", say=_say)


def _miss_engines(folder: Path, options: Namespace) -> dict[str, TierEngine]:
    from headwater.device.model import load

    model = load(str(options.folder))
    plain = _settings(options) | {"swap_space_gib": 0.0, "num_blocks_override": 64}
    tiers = plain | {"swap_space_gib": 0.25, "storage_backend": "file"}
    through = tiers | {"write_policy": "write_through"}
    return {
        "none": TierEngine(model, **plain),
        "control": TierEngine(model, **plain),
        "default": TierEngine(model, **tiers, storage_config=_file(folder / "default")),
        "write_through": TierEngine(model, **through, storage_config=_file(folder / "through")),
    }


def _summary(name: str, losses: list[float]) -> Result:
    """The mean over pairs, its 95 % interval, and the median."""
    return {
        name: fmean(losses),
        f"{name}_ci95": _interval(losses),
        f"{name}_median": median(losses),
    }


def _compute(engine: TierEngine, length: int, rounds: int) -> tuple[Tokens, float]:
    """A prompt that every tier has, and the median seconds to the first token of prompts that no
    tier has. The first one warms up: the pages of the pools are used for the first time."""
    times = []
    for number in range(1 + rounds):
        engine.core.reset_cache(("device", "host", "storage"))
        engine.drain()
        prompt = engine.make_prompt(length, seed=1000 * length + number)
        times.append(engine.serve([prompt], max_tokens=1).first_s)
        engine.drain()
    return prompt, median(times[1:])


def _hit_s(engine: TierEngine, prompt: Tokens, tier: str, rounds: int) -> float:
    """Median seconds to the first token if only `tier` has the prompt."""
    times = []
    for _ in range(rounds):
        if tier == "host":
            engine.clear_device()
        else:
            engine.core.reset_cache()
        served = engine.serve([prompt], max_tokens=1)
        name = "host" if tier == "host" else "storage"
        assert served.found[name] >= len(prompt) - 64, f"no hit in {tier}: {served.found}"
        times.append(served.first_s)
        engine.drain()
    return median(times)


def _interval(values: list[float]) -> dict[str, float]:
    """95 % interval of the means of samples drawn from `values`."""
    rng = np.random.default_rng(1)
    drawn = rng.choice(values, (2000, len(values)))
    low, high = np.percentile(drawn.mean(axis=1), [2.5, 97.5])
    return {"low": float(low), "high": float(high)}


def _settings(options: Namespace) -> dict[str, Any]:
    num_blocks = max(options.lengths) // 64 + 72
    return {
        "model": str(options.folder),
        "num_blocks_override": num_blocks,
        "swap_space_gib": 1.0,
        "num_threads": 1,
    }


def _file(folder: Path) -> dict[str, Any]:
    return {"path": str(folder), "capacity_bytes": _CAPACITY_BYTES, "reserve_bytes": 0}


def _model(options: Namespace) -> Path:
    from headwater.device import builtin

    tiny = options.quick or options.model == "tiny"
    return builtin.ensure() if tiny else builtin.ensure_bench()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="headwater bench tiers",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--parts",
        nargs="+",
        choices=(*_PARTS, *_TRACE_PARTS),
        default=list(_PARTS),
        help="parts to measure (all that need no trace)",
    )
    add("--trace", type=Path, help="trace in the Mooncake format, for storage-order")
    add(
        "--requests",
        type=int,
        default=3000,
        help="number of requests from the start of the trace (3000)",
    )
    add("--model", choices=("tiny", "100m"), default="100m", help="model served (100m)")
    add(
        "--lengths",
        nargs="+",
        type=int,
        default=[1024, 4096, 16384],
        help="prompt lengths in tokens (1024 4096 16384)",
    )
    add("--pairs", type=int, default=24, help="pairs of runs that never hit (24)")
    add("--miss-tokens", type=int, default=256, help="tokens of a prompt that never hits (256)")
    add(
        "--rounds",
        type=int,
        default=5,
        help="number of runs; the median is reported, for backends the fastest (5)",
    )
    add(
        "--blocks", type=int, default=64, help="blocks of 1 MiB moved to a backend at once (64)"
    )
    add(
        "--hung-calls",
        nargs="+",
        choices=CALLS,
        default=list(CALLS),
        help="first call that the stopped backend does not answer (all)",
    )
    add(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=list(BACKENDS),
        help="backends to stop (all that are installed)",
    )
    add(
        "--hung-prompts", type=int, default=100, help="prompts served while storage hangs (100)"
    )
    add(
        "--live-cells",
        nargs="+",
        choices=list(live_scenarios()),
        default=list(live_scenarios()),
        metavar="TIER/TOKENS/LOAD/LINK",
        help="cells of pricing-live (all)",
    )
    add(
        "--eviction",
        choices=EVICTIONS,
        default="lru",
        help="eviction policy of the sessions part (lru)",
    )
    add("--dir", metavar="PATH", help="folder of the file backend (a temporary one)")
    add(
        "--quick",
        action="store_true",
        help="use the built-in model, shorter prompts and fewer runs",
    )
    add("--json", action="store_true", help="print one JSON object")
    return parser
