"""Replays a trace through the cache alone: one request after the other, without an engine.

Every hash id is one full block, including the last one of a request; no output is appended. The
blocks of a request are cached when it ends. If the cache then holds too much, the eviction
policy chooses victims, which may be blocks of the same request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headwater.cache import CacheConfig, FinishedRequest, TieredCache, TokenPath
from headwater.cache.policy.weights import Weights
from headwater.errors import ConfigError, InvariantError
from headwater.replay.hints import NOTHING, SessionHint, hints_of
from headwater.replay.optimum import optimal_hits
from headwater.replay.trace import TRACE_BLOCK, TraceRequest
from headwater.types import RequestId, Tokens, WritePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReplay:
    """What was found in the cache, and why the rest was not."""

    requests: int
    blocks: int
    hit_blocks: int
    tokens: int
    hit_tokens: int
    misses_by_reason: dict[str, int]
    learned: Weights | None = None
    """What the session policy had learned at the end."""

    @property
    def block_hit(self) -> float:
        """Share of all blocks that were found."""
        return self.hit_blocks / max(self.blocks, 1)

    @property
    def token_hit(self) -> float:
        """Share of all prompt tokens that were found; a partial block counts its tokens."""
        return self.hit_tokens / max(self.tokens, 1)


class CacheOnly:
    """One cache of `capacity_blocks` that serves requests one by one."""

    def __init__(
        self,
        capacity_blocks: int,
        longest_blocks: int,
        *,
        eviction: str = "lru",
        weights: Weights | None = None,
        record_events: bool = False,
    ) -> None:
        if capacity_blocks < 0:
            raise ConfigError(f"--capacity-blocks cannot be negative, got {capacity_blocks}")
        self._capacity = capacity_blocks
        self.cache = TieredCache(
            CacheConfig(
                # Room for one more request: the cache is trimmed when a request ends.
                device_blocks=capacity_blocks + longest_blocks,
                block_tokens=TRACE_BLOCK,
                write_policy=WritePolicy.NONE,
                eviction=eviction,
                weights=weights,
                hint_share=1.0,  # a trace is one tenant, so there is no other tenant to protect
                record_events=record_events,
            )
        )

    def learned(self) -> Weights | None:
        """What the session policy has learned so far; None for a policy that does not learn."""
        return self.cache.learned_weights()

    def serve(self, request: TraceRequest, prompt: Tokens, hint: SessionHint = NOTHING) -> int:
        """Serve one request, whose full blocks are `prompt`, and return how many of them were
        found."""
        cache, now = self.cache, request.arrival_s
        path = TokenPath(prompt)
        lease = cache.lease(cache.match(path), owner=RequestId(""), now=now)
        found = lease.num_blocks
        slots = cache.take(len(request.hash_ids) - found, now=now)
        if slots is None:
            raise InvariantError("an idle cache has no room for a request")
        cache.commit(lease, path, slots, now=now)
        finished = FinishedRequest(request.input_length, request.output_length, *hint)
        cache.release(lease, now=now, finished=finished)
        cache.trim(self._capacity)
        return found


def replay_cache(
    requests: Sequence[TraceRequest],
    capacity_blocks: int | None,
    *,
    eviction: str = "lru",
    weights: Weights | None = None,
    hints: str = "none",
) -> CacheReplay:
    """Serve all requests, in order, with one cache that is empty at first. A capacity of None
    means a cache that never fills."""
    if capacity_blocks is None:
        capacity_blocks = _num_distinct(requests)
    longest = longest_blocks(requests)
    replay = CacheOnly(capacity_blocks, longest, eviction=eviction, weights=weights)
    found = [
        replay.serve(request, request.whole_blocks(), hint)
        for request, hint in zip(requests, hints_of(requests, hints), strict=True)
    ]
    reasons = replay.cache.stats().ledger.misses_by_reason
    replayed = _summed(requests, found, {reason.value: n for reason, n in reasons.items()})
    return replace(replayed, learned=replay.learned())


def replay_optimum(
    requests: Sequence[TraceRequest], capacity_blocks: int | None
) -> CacheReplay:
    """Like `replay_cache`, with the best possible eviction (`optimum`). It reports no miss
    reasons."""
    if capacity_blocks is None:
        capacity_blocks = _num_distinct(requests)
    return _summed(requests, list(optimal_hits(requests, capacity_blocks)), {})


def longest_blocks(requests: Sequence[TraceRequest]) -> int:
    """Blocks of the longest request."""
    return max((len(request.hash_ids) for request in requests), default=0)


def _num_distinct(requests: Sequence[TraceRequest]) -> int:
    return len({block for request in requests for block in request.hash_ids})


def _summed(
    requests: Sequence[TraceRequest], found: Sequence[int], reasons: dict[str, int]
) -> CacheReplay:
    """Totals over requests that found the given numbers of blocks."""
    hits = np.array(found, dtype=np.int64)
    lengths = np.array([request.input_length for request in requests], dtype=np.int64)
    return CacheReplay(
        requests=len(requests),
        blocks=sum(len(request.hash_ids) for request in requests),
        hit_blocks=int(hits.sum()),
        tokens=int(lengths.sum()),
        hit_tokens=int(np.minimum(hits * TRACE_BLOCK, lengths).sum()),
        misses_by_reason=reasons,
    )
