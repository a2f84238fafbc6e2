"""The cost that tiers, KV events and block-by-block commits add to a request in the cache.

Each configuration adds to the one before. The cache is used as an engine uses it: a request asks
storage for blocks that memory does not have, loads what the lower tiers have, and announces what
it computes; writes are planned after each commit, within the limits of the scheduler. Copies take
the time that they take on a measured machine, so a write is finished when a later request
arrives, and storage accepts no more than a disk does. Only the decisions are timed, as CPU time
of their thread. The keys of a prompt are computed before its request is timed, because an
engine computes them in other threads.
"""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from headwater.cache import (
    CacheConfig,
    FinishedRequest,
    JobOutcome,
    JobStatus,
    Match,
    OffloadJob,
    PathKeys,
    TieredCache,
    TokenPath,
    TransferJob,
)
from headwater.engine.collector import settle_collector
from headwater.errors import InvariantError
from headwater.events import BlocksRemoved, BlocksStored, CacheEvent
from headwater.replay.links import Delivery, SharedLink
from headwater.replay.presets import preset
from headwater.replay.trace import TraceRequest
from headwater.scheduler.config import SchedulerConfig
from headwater.transfer.mover import link_of
from headwater.types import BlockKey, RequestId, Slots, Tier, Tokens, WritePolicy

_HOST = {"write_policy": WritePolicy.AUTO}
_STORAGE = _HOST | {"storage": True}
_EVENTS = _STORAGE | {"record_events": True}

_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": _HOST,
    "storage": _STORAGE,
    "events": _EVENTS,
    "block_commits": _EVENTS,
    "session": _EVENTS | {"eviction": "session"},
    "write_through": _EVENTS | {"write_policy": WritePolicy.WRITE_THROUGH},
}
_BY_BLOCK = ("block_commits", "session", "write_through")
"""Configurations that commit the output block by block."""

_HOST_RATIO = 2
"""Blocks of the host tier for each block of the device."""

_SPACING_S = 0.3
"""Time between two requests: the mean of the conversation trace, whose times are multiples of
three seconds."""

_MACHINE = "h200-8b"
"""The preset whose measured links decide how long copies take."""


def measure_parts(
    requests: list[TraceRequest], *, capacity_blocks: int, block: int, repeats: int
) -> dict[str, Any]:
    """For each configuration: the mean CPU time of a request, counts per request, and hit
    tokens, all from the fastest of `repeats` replays."""
    result: dict[str, Any] = {}
    for name, settings in _CONFIGURATIONS.items():
        rows = [
            _Replay(capacity_blocks, block, settings, by_block=name in _BY_BLOCK).run(requests)
            for _ in range(repeats)
        ]
        result[name] = min(rows, key=lambda row: float(row["mean_us"]))
    return result


class _Replay:
    """Serves the requests of a trace, one after another."""

    def __init__(
        self, capacity_blocks: int, block: int, settings: dict[str, Any], *, by_block: bool
    ) -> None:
        self._has_host = bool(settings)
        self._cache = TieredCache(
            CacheConfig(
                device_blocks=capacity_blocks,
                block_tokens=block,
                host_blocks=_HOST_RATIO * capacity_blocks if settings else 0,
                **settings,
            )
        )
        self._by_block = by_block
        machine = preset(_MACHINE)
        self._block_bytes = machine.kv_token_bytes * block
        self._links = {name: SharedLink(cost) for name, cost in machine.links.items()}
        self._limits = {
            Tier.HOST: capacity_blocks // 8,
            Tier.STORAGE: SchedulerConfig(max_model_len=2).max_write_blocks,
        }
        """Blocks that may be in flight to each tier."""
        self._ended: list[TransferJob] = []
        self._started: list[OffloadJob] = []
        self._in_storage: set[BlockKey] = set()
        self._events: Sequence[CacheEvent] = ()
        self._now = 0.0
        self._counts: Counter[str] = Counter()

    def run(self, requests: list[TraceRequest]) -> dict[str, Any]:
        """Serve each request. Everything that an engine does in other threads, and all
        counting, happens between the timed parts."""
        settle_collector()
        spent_ns = 0
        for number, request in enumerate(requests):
            self._now = number * _SPACING_S
            prompt = request.prompt()
            whole = np.concatenate((prompt, request.output(number)))
            path, found = self._prepare(prompt)
            began = time.thread_time_ns()
            for job in self._ended:
                self._finish(job)
            self._serve(RequestId(str(number)), path, whole, found)
            self._events = self._cache.take_events()
            spent_ns += time.thread_time_ns() - began
            self._account()
        self._cache.check()
        if self._has_host and not self._counts["blocks_to_host"]:
            raise InvariantError("a configuration with a host tier wrote nothing to it")
        stats = self._cache.stats()
        self._counts["blocks_evicted_device"] = stats.evicted_device
        self._counts["blocks_evicted_host"] = stats.evicted_host
        return {
            "mean_us": spent_ns / 1e3 / len(requests),
            "per_request": {n: c / len(requests) for n, c in sorted(self._counts.items())},
            "hit_tokens": stats.ledger.found_tokens,
        }

    def _prepare(self, prompt: Tokens) -> tuple[TokenPath, int]:
        """What other threads do before a request is decided: end copies, compute its keys, and
        find out how many of its blocks are in storage."""
        for link in self._links.values():
            link.deliver(self._now)
        path = TokenPath(prompt, keys=PathKeys())
        config = self._cache.config
        if not config.storage and not config.record_events:
            return path, 0
        num_blocks = (len(prompt) - 1) // config.block_tokens
        keys = self._cache.scheme.of_path(path, path.num_blocks(config.block_tokens))
        missing = (n for n, key in enumerate(keys) if key not in self._in_storage)
        return path, min(next(missing, num_blocks), num_blocks)

    def _serve(self, owner: RequestId, path: TokenPath, whole: Tokens, found: int) -> None:
        """Serve one request, from its match to its release."""
        cache, now, size = self._cache, self._now, self._cache.block_tokens
        num_prompt, counts = len(path.tokens), self._counts
        match = cache.match(path, (num_prompt - 1) // size)
        if self._has_host and match.device_blocks < match.max_blocks:
            match = self._load(match, found)
        lease = cache.lease(match, owner=owner, now=now)
        slots = self._take(-(-num_prompt // size) - lease.num_blocks)
        cache.announce(lease, path)
        rest: list[Slots] = []
        for length in self._commit_lengths(num_prompt, len(whole)):
            held = -(-length // size) - lease.num_blocks
            if held > len(slots):
                slots = np.concatenate((slots, self._take(held - len(slots))))
            full = length // size - lease.num_blocks
            if full > 0:
                counts["commits"] += 1
                counts["blocks_committed"] += full
                grown = TokenPath(whole[:length], keys=path.keys)
                surplus = cache.commit(lease, grown, slots[:full].copy(), now=now)
                if len(surplus):
                    rest.append(surplus)
                slots = slots[full:]
            if self._has_host:
                self._write()
        finished = FinishedRequest(num_prompt, len(whole) - num_prompt)
        held_slots = np.concatenate((slots, *rest)) if rest else slots
        cache.release(lease, now=now, slots=held_slots, finished=finished)
        if self._has_host:
            self._write()

    def _commit_lengths(self, num_prompt: int, num_whole: int) -> list[int]:
        """Lengths of the sequence at which it commits its full blocks."""
        size = self._cache.block_tokens
        if not self._by_block:
            return [num_prompt, num_whole]
        first = (num_prompt // size + 1) * size
        return [num_prompt, *range(first, num_whole, size), num_whole]

    def _load(self, match: Match, found: int) -> Match:
        """Ask storage, which has `found` blocks, and bring what was found to the device."""
        cache, now = self._cache, self._now
        path, limit = match.path, match.max_blocks
        if cache.config.storage and match.num_blocks < limit:
            self._counts["lookups"] += 1
            lookup = cache.plan_lookup([(path, limit)])
            outcome = JobOutcome(job=lookup.job, status=JobStatus.DONE, found=(found,))
            cache.finish_job(outcome, now=now)
            if not cache.is_current(match):
                match = cache.match(path, limit)
        while match.host_blocks or match.storage_blocks:
            job = cache.plan_load(match, limit_blocks=match.num_blocks, now=now)
            if job is None:
                break
            self._counts["load_jobs"] += 1
            self._counts["blocks_loaded"] += job.num_blocks
            self._finish(job)
            match = cache.match(path, limit)
        return match

    def _write(self) -> None:
        """Plan the writes that are due, as the scheduler does in each step."""
        cache, limits = self._cache, self._limits
        to_store = limits[Tier.STORAGE]
        if not cache.may_offload(can_store=to_store > 0):
            return
        plans = cache.plan_offloads(
            limit_blocks=limits[Tier.HOST], limit_stored=to_store, now=self._now
        )
        for job in plans:
            limits[job.target] -= job.num_blocks
        self._started += plans

    def _finish(self, job: TransferJob) -> None:
        outcome = JobOutcome(job=job.job, status=JobStatus.DONE)
        self._cache.finish_job(outcome, now=self._now)

    def _account(self) -> None:
        """Start the planned copies, and count the blocks of each kind of copy and event."""
        for job in self._ended:
            self._limits[job.target] += job.num_blocks
            self._in_storage.update(job.keys)
        self._ended = []
        for write in self._started:
            tier = write.target.name.lower()
            self._counts[f"jobs_to_{tier}"] += 1
            self._counts[f"blocks_to_{tier}"] += write.num_blocks
            self._links[link_of(write)].start(
                write.num_blocks * self._block_bytes,
                partial(self._arrive, write),
                now=self._now,
            )
        self._started = []
        self._counts["events"] += len(self._events)
        for event in self._events:
            if isinstance(event, BlocksStored | BlocksRemoved):
                self._counts["blocks_in_events"] += len(event.keys)

    def _arrive(self, job: OffloadJob, delivery: Delivery) -> None:
        self._ended.append(job)

    def _take(self, count: int) -> Slots:
        slots = self._cache.take(count, now=self._now)
        if slots is None:
            raise InvariantError(f"an idle cache could not give {count} blocks")
        return slots
