"""`headwater bench eviction`: hits of each eviction policy, compared with an LRU and the
optimum.

Replays a trace through the cache alone, once for each policy and capacity: `headwater replay
--cache-only`. `gap_closed` is the share of the way from the LRU to the offline optimum. Times
are CPU times of the process, without the creation of the prompts. For each request the best of
several equal runs counts, minus that of the LRU.
"""

import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwater.bench._flags import read_flags
from headwater.bench._report import print_report
from headwater.bench._shapes import SHAPES, make_shape
from headwater.cache.policy import POLICIES
from headwater.cache.policy.weights import Weights
from headwater.engine.collector import settle_collector
from headwater.errors import ConfigError
from headwater.launch.weights import load_weights, require_unseen
from headwater.replay.cache_only import CacheOnly, longest_blocks
from headwater.replay.hints import HINTS, NOTHING, SessionHint, hints_of
from headwater.replay.optimum import optimal_hits
from headwater.replay.trace import TraceRequest, read_trace
from headwater.replay.variants import VARIANTS

Micros: TypeAlias = NDArray[np.float64]

_CAPACITIES = (1_000, 3_000, 5_859, 10_000, 30_000)
_QUICK_REQUESTS = 2_000
_SHOWN = "session"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table, or JSON."""
    options = read_flags(_parser(), argv)
    capacities = _capacities(options.capacity)
    limit = options.requests
    if options.quick:
        limit = min(limit or _QUICK_REQUESTS, _QUICK_REQUESTS)
    if options.trace is not None and options.shape != "mixed":
        raise ConfigError("--shape is for synthetic sessions: leave it out with --trace")
    if options.trace is None:
        requests = make_shape(options.shape, limit or 10_000, options.seed)
    else:
        requests = read_trace(options.trace, limit)
    requests = VARIANTS[options.variant](requests)
    if not requests:
        raise ConfigError("there are no requests to replay")
    weights = load_weights(options.weights)
    if options.trace is not None:
        require_unseen(weights, options.trace)
    settle_collector()
    setup = _Setup(capacities, options.repeat, weights, hints_of(requests, options.hints))
    result = {"weights": options.weights, "hints": options.hints} | compare(requests, setup)
    print_report("headwater bench eviction", result, as_json=options.json)
    return 0


class _Setup(NamedTuple):
    """What is compared, in addition to the policies."""

    capacities: Sequence[int]
    repeat: int
    weights: Weights | None
    hints: Sequence[SessionHint]


def compare(requests: Sequence[TraceRequest], setup: _Setup) -> dict[str, Any]:
    """Block hits by policy and capacity, the gaps closed, and the cost of a request."""
    blocks = sum(len(request.hash_ids) for request in requests)
    names = sorted(POLICIES)
    hits: dict[str, dict[str, float]] = {name: {} for name in names}
    costs: dict[str, dict[str, Micros]] = {name: {} for name in names}
    optimum = {}
    for capacity in setup.capacities:
        optimum[str(capacity)] = sum(optimal_hits(requests, capacity)) / blocks
        # Policies alternate, so that other load on the machine affects all of them.
        for _ in range(setup.repeat):
            for name in names:
                found, micros = _measure(requests, capacity, name, setup)
                hits[name][str(capacity)] = found / blocks
                before = costs[name].get(str(capacity), micros)
                costs[name][str(capacity)] = np.minimum(before, micros)
    closed = {name: _gap_closed(hits[name], hits["lru"], optimum) for name in names}
    return {
        "requests": len(requests),
        "blocks": blocks,
        "block_hit": hits | {"optimum": optimum},
        "gap_closed": closed[_SHOWN],
        "gap_closed_by_policy": closed,
        "us_over_lru": {
            name: {at: float((c - costs["lru"][at]).mean()) for at, c in costs[name].items()}
            for name in names
            if name != "lru"
        },
        "lru_us": {at: float(cost.mean()) for at, cost in costs["lru"].items()},
    }


def _measure(
    requests: Sequence[TraceRequest], capacity: int, name: str, setup: _Setup
) -> tuple[int, Micros]:
    """Blocks found, and µs of CPU time of each request."""
    weights = setup.weights if name == _SHOWN else None
    hints = [NOTHING] * len(requests) if name == "lru" else setup.hints
    replay = CacheOnly(capacity, longest_blocks(requests), eviction=name, weights=weights)
    found, nanos = 0, []
    for request, hint in zip(requests, hints, strict=True):
        prompt = request.whole_blocks()
        start = time.process_time_ns()
        found += replay.serve(request, prompt, hint)
        nanos.append(time.process_time_ns() - start)
    return found, np.array(nanos) / 1e3


def _gap_closed(
    hits: dict[str, float], lru: dict[str, float], optimum: dict[str, float]
) -> dict[str, float | None]:
    """(policy - LRU) / (optimum - LRU); None if the LRU is the optimum."""
    return {
        at: (hit - lru[at]) / (optimum[at] - lru[at]) if optimum[at] > lru[at] else None
        for at, hit in hits.items()
    }


def _capacities(text: str) -> list[int]:
    try:
        capacities = [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise ConfigError(f"--capacity must be numbers of blocks, got {text!r}") from exc
    if min(capacities) < 1:
        raise ConfigError(f"--capacity must be at least 1 block, got {text!r}")
    return capacities


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="headwater bench eviction", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--trace", type=Path, help="trace in the Mooncake format (default: synthetic sessions)"
    )
    parser.add_argument(
        "--capacity",
        metavar="N,N",
        default=",".join(map(str, _CAPACITIES)),
        help="cache sizes in blocks of 512 tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--requests", type=int, help="number of requests from the start (default: all)"
    )
    parser.add_argument(
        "--variant",
        choices=sorted(VARIANTS),
        default="as-is",
        help="variant of the trace to use (default: %(default)s)",
    )
    parser.add_argument(
        "--weights",
        metavar="none|shipped|FILE",
        default="none",
        help="initial weights of the session policy, not learned from this trace (default: none)",
    )
    parser.add_argument(
        "--hints",
        choices=HINTS,
        default="none",
        help="hints of clients about their sessions; the LRU gets none (default: none)",
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="mixed",
        help="shape of the synthetic sessions, without --trace (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the synthetic sessions (1)"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="runs of each policy; the fastest counts (1)"
    )
    parser.add_argument("--quick", action="store_true", help="use fewer requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
