"""Routing policies on a trace: simulated instances, chosen by their KV events.

Every instance is a real cache with an LRU. The routers know it only through its KV events.
Several routers share the requests at random: each knows all caches, but only the work that it
assigned itself. For comparison there is one pool of the size of all caches together.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headwater.bench._workload import make_sessions
from headwater.cache import KeyScheme
from headwater.cache.keys import SHARED
from headwater.disagg.routing import POLICIES, Candidate, Policy, RecentWork, make_policy
from headwater.errors import InvariantError
from headwater.events import BlocksStored
from headwater.metrics.kv_events import EventBatch, block_hash, events_of
from headwater.replay.cache_only import CacheOnly, longest_blocks, replay_cache
from headwater.replay.trace import TRACE_BLOCK, TraceRequest, read_trace
from headwater.server.router.cache_view import BlockView, EventBatchResult
from headwater.types import Tokens

_INSTANCES = 8
_INSTANCE_BLOCKS = 3_000_000 // TRACE_BLOCK
_QUICK_REQUESTS = 2_000


class LongestPrefix:
    """Affinity alone, for comparison: the instance with the most cached blocks, however busy it
    is."""

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda c: (-c.cached_tokens, c.recent_tokens))


class RoutedCache:
    """A cache, and what each router knows of it."""

    def __init__(self, name: str, longest: int, num_routers: int) -> None:
        self.name = name
        self.view = BlockView("")
        self.recent = [RecentWork() for _ in range(num_routers)]
        self.assigned_tokens = 0
        self._cache = CacheOnly(_INSTANCE_BLOCKS, longest, record_events=True)

    def candidate(self, hashes: Sequence[int], now: float, router: int) -> Candidate:
        """What `router` knows of this cache when a prompt of these blocks arrives."""
        return Candidate(
            name=self.name,
            cached_tokens=self.view.match(hashes) * TRACE_BLOCK,
            recent_tokens=self.recent[router].tokens(now=now),
        )

    def serve(self, request: TraceRequest, prompt: Tokens, believed: int, router: int) -> int:
        """Serve the request; return how many blocks it found, which must be what the router
        expected."""
        found = self._cache.serve(request, prompt)
        if found != believed:
            raise InvariantError(
                f"{self.name} had {found} blocks, but its events announced {believed}"
            )
        uncached = max(request.input_length - found * TRACE_BLOCK, 0)
        self.assigned_tokens += uncached
        self.recent[router].add(uncached, now=request.arrival_s)
        self._tell()
        return found

    def _tell(self) -> None:
        """Send the changes of the cache as an event batch, without tokens, which are not needed
        here."""
        bare = [
            replace(change, tokens=b"") if isinstance(change, BlocksStored) else change
            for change in self._cache.cache.take_events()
        ]
        batch = EventBatch(ts=0.0, events=events_of(bare, TRACE_BLOCK))
        if self.view.apply(self.view.next, batch) is not EventBatchResult.APPLIED:
            raise InvariantError("the router did not apply the next batch in order")


def measure_router(trace: Path | None, quick: bool, num_routers: int = 2) -> dict[str, Any]:
    """Block hits and balance of each policy, those of `cache_aware` with `num_routers` routers
    side by side, and the hits of one pool. Without a trace the requests are synthetic."""
    limit = _QUICK_REQUESTS if quick else None
    requests = (
        make_sessions(limit or 10_000, seed=0) if trace is None else read_trace(trace, limit)
    )
    hashes = [_hashes(request.whole_blocks()) for request in requests]
    policies: dict[str, Policy] = {name: make_policy(name) for name in POLICIES}
    policies["longest_prefix"] = LongestPrefix()
    pool = replay_cache(requests, _INSTANCES * _INSTANCE_BLOCKS).block_hit
    routed = {name: _route(requests, hashes, policies[name]) for name in sorted(policies)}
    one = routed["cache_aware"]
    several = _route(requests, hashes, make_policy("cache_aware"), num_routers)
    return {
        "router": routed,
        "pool_block_hit": pool,
        "router_share_of_pool": one["block_hit"] / pool if pool else 0.0,
        "routers": {
            "num_routers": num_routers,
            **several,
            "share_of_one_router": several["block_hit"] / (one["block_hit"] or 1.0),
        },
    }


def _route(
    requests: Sequence[TraceRequest],
    hashes: Sequence[Sequence[int]],
    policy: Policy,
    num_routers: int = 1,
) -> dict[str, float]:
    longest = longest_blocks(requests)
    instances = {f"i{n}": RoutedCache(f"i{n}", longest, num_routers) for n in range(_INSTANCES)}
    routers = np.random.default_rng(0).integers(num_routers, size=len(requests)).tolist()
    hits = 0
    for request, prompt_hashes, router in zip(requests, hashes, routers, strict=True):
        now = request.arrival_s
        candidates = [i.candidate(prompt_hashes, now, router) for i in instances.values()]
        chosen = policy.choose(request.input_length, candidates)
        believed = chosen.cached_tokens // TRACE_BLOCK
        hits += instances[chosen.name].serve(request, request.whole_blocks(), believed, router)
    assigned = [instance.assigned_tokens for instance in instances.values()]
    return {
        "block_hit": hits / max(sum(len(request.hash_ids) for request in requests), 1),
        "max_over_mean": max(assigned) * _INSTANCES / max(sum(assigned), 1),
    }


def _hashes(prompt: Tokens) -> list[int]:
    """The names of a prompt's blocks in KV events, computed from the tokens as the router
    does."""
    scheme = KeyScheme(block_tokens=TRACE_BLOCK)
    keys = scheme.chain(scheme.root(SHARED), prompt.data.cast("B"), None)
    return [block_hash(key) for key in keys]
