"""The cost that tiers, KV events and block-by-block commits add to a request in the cache.

Each configuration adds to the one before. Its offloads are planned and end at once, as if
copies took no time: only the decisions are timed, as CPU time of their thread. Keys of prompts
are computed before, because an engine computes them in other threads.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwater.cache import CacheConfig, JobOutcome, JobStatus, PathKeys, TieredCache, TokenPath
from headwater.engine.collector import settle_collector
from headwater.errors import InvariantError
from headwater.replay.trace import TraceRequest
from headwater.types import RequestId, Slots, Tokens, WritePolicy

_HOST = {"write_policy": WritePolicy.WRITE_THROUGH}
_STORAGE = _HOST | {"storage": True}
_EVENTS = _STORAGE | {"record_events": True}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": _HOST,
    "storage": _STORAGE,
    "events": _EVENTS,
    "block_commits": _EVENTS,
    "session": _EVENTS | {"eviction": "session"},
}
_BY_BLOCK = ("block_commits", "session")
"""Configurations that commit the output block by block."""

_HOST_RATIO = 2
"""Blocks of the host tier over those of the device."""

_MAX_OFFLOAD_BLOCKS = 256


@dataclass(slots=True)
class _Times:
    """Nanoseconds so far, by part."""

    request_ns: int = 0
    offload_ns: int = 0
    events_ns: int = 0
    offloaded_blocks: int = 0
    blocks_by_tier: dict[str, int] = field(default_factory=dict)


def measure_parts(
    requests: list[TraceRequest], *, capacity_blocks: int, block: int, repeats: int
) -> dict[str, Any]:
    """Mean microseconds per request, by configuration and part; the fastest of `repeats`
    replays."""
    result: dict[str, Any] = {}
    for name, settings in CONFIGURATIONS.items():
        rows = [
            _replay(requests, capacity_blocks, block, settings, by_block=name in _BY_BLOCK)
            for _ in range(repeats)
        ]
        result[name] = min(rows, key=lambda row: float(row["total_us"]))
    return result


def _replay(
    requests: list[TraceRequest],
    capacity_blocks: int,
    block: int,
    settings: dict[str, Any],
    *,
    by_block: bool,
) -> dict[str, float]:
    host_blocks = _HOST_RATIO * capacity_blocks if settings else 0
    cache = TieredCache(
        CacheConfig(
            device_blocks=capacity_blocks,
            block_tokens=block,
            host_blocks=host_blocks,
            **settings,
        )
    )
    settle_collector()
    times = _Times()
    for number, request in enumerate(requests):
        prompt = request.prompt()
        whole = np.concatenate((prompt, request.output(number)))
        keys = PathKeys()
        if cache.config.storage or cache.config.record_events:
            cache.key_scheme.of_path(TokenPath(prompt, keys=keys), len(prompt) // block)
        began = time.thread_time_ns()
        _serve(cache, RequestId(str(number)), prompt, whole, keys, by_block=by_block)
        served = time.thread_time_ns()
        if host_blocks:
            times.offloaded_blocks += _offload(cache)
        offloaded = time.thread_time_ns()
        cache.take_events()
        times.events_ns += time.thread_time_ns() - offloaded
        times.offload_ns += offloaded - served
        times.request_ns += served - began
    cache.check()
    if host_blocks and not times.offloaded_blocks:
        raise InvariantError("a configuration with a host tier wrote nothing to it")
    count = 1e3 * len(requests)
    parts = {
        "request_us": times.request_ns / count,
        "offload_us": times.offload_ns / count,
        "events_us": times.events_ns / count,
    }
    return {
        "total_us": sum(parts.values()),
        **parts,
        "offloaded_blocks": times.offloaded_blocks,
        "hit_tokens": cache.stats().ledger.found_tokens,
    }


def _serve(
    cache: TieredCache,
    owner: RequestId,
    prompt: Tokens,
    whole: Tokens,
    keys: PathKeys,
    *,
    by_block: bool,
) -> None:
    """One request, from its match to its release; output is committed at once or block by
    block."""
    size = cache.block_tokens
    path = TokenPath(prompt, keys=keys)
    lease = cache.lease(cache.match(path, (len(prompt) - 1) // size), owner=owner, now=0.0)
    slots = _taken(cache, -(-len(whole) // size) - lease.num_blocks)
    lengths = [len(prompt), len(whole)]
    if by_block:
        first = (len(prompt) // size + 1) * size
        lengths = [len(prompt), *range(first, len(whole), size), len(whole)]
    rest: list[Slots] = []
    for length in lengths:
        full = max(length // size - lease.num_blocks, 0)
        grown = TokenPath(whole[:length], keys=keys)
        rest.append(cache.commit(lease, grown, slots[:full], now=0.0))
        slots = slots[full:]
    cache.release(lease, now=0.0, slots=np.concatenate((slots, *rest)))


def _offload(cache: TieredCache) -> int:
    """Plan the offloads that are due, let each succeed, and return the number of blocks."""
    count = 0
    for plan in cache.plan_offloads(
        limit_blocks=_MAX_OFFLOAD_BLOCKS, limit_stored=_MAX_OFFLOAD_BLOCKS, now=0.0
    ):
        count += plan.num_blocks
        cache.finish_job(JobOutcome(job=plan.job, status=JobStatus.DONE), now=0.0)
    return count


def _taken(cache: TieredCache, count: int) -> Slots:
    slots = cache.take(count, now=0.0)
    if slots is None:
        raise InvariantError(f"an idle cache could not give {count} blocks")
    return slots
