"""The guard of the session policy: a sample of sessions is served by two small caches.

One of them evicts by the session policy, the other is an LRU. Both have the share of the cache
that the sample has of the traffic. While the LRU finds more, the real order is that of an LRU.
The small caches are ordinary caches; their blocks are the numbers of prefixes.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np

from headwater.cache.config import CacheConfig
from headwater.cache.keys import TokenPath
from headwater.cache.plan import Lease
from headwater.cache.policy import FinishedRequest, MarkedRun, Orders, Shape
from headwater.cache.policy.lru import Lru
from headwater.cache.policy.retention import (
    FIRST_SAMPLES,
    PIECE_TOKENS,
    Retention,
    Visit,
)
from headwater.cache.policy.session import SessionPolicy
from headwater.cache.tiered import TieredCache
from headwater.types import RequestId, Tier, WritePolicy

_SAMPLE_BITS = 4
"""One session in 16 (2 ** 4) is in the sample."""

_LONGEST = 4096
"""Longest path, in pieces, that the small caches accept; longer paths are cut."""

_MEMORY = 1 - 1 / 1024
"""Factor by which a count decays from one request of the sample to the next."""

_TOLERANCE, _RELIEF = 0.002, 0.0005
"""Lead of the LRU, as a share of the counted pieces, at which the real order becomes an LRU;
and the lead at which it stops being one."""

_SURE = 2.0
"""A lead counts only above this many standard deviations: one long prompt proves nothing."""

_BLOCK_TOKENS = 2
"""A prefix's number is 64 bits: two tokens."""


def make_orders(shape: Shape, *, piece_tokens: int = PIECE_TOKENS) -> Orders:
    """The session policy for both tiers, with its guard."""
    retention = Retention(shape.block_tokens, piece_tokens, shape.weights, FIRST_SAMPLES)
    orders = SessionPolicy(retention, Tier.DEVICE), SessionPolicy(retention, Tier.HOST)
    retention.watch = ShadowComparison(retention, orders).watch
    return Orders(*orders)


class ShadowComparison:
    """Sets `cautious` on both orders while an LRU does better on the sample."""

    def __init__(
        self, retention: Retention, orders: tuple[SessionPolicy, SessionPolicy]
    ) -> None:
        self._retention = retention
        self._orders = orders
        self._small: tuple[_Small, _Small] | None = None
        self._pieces = 0.0
        self._sampled = 0.0
        self._seen = 0.0
        self._lead = 0.0
        """How many more of the `_seen` pieces the LRU found than the session policy."""
        self._spread = 0.0
        """Sum of the squares of each request's contribution to the lead."""

    @property
    def share(self) -> float:
        """Share of all pieces that belong to the sample."""
        return self._sampled / self._pieces if self._pieces else 0.0

    def watch(self, visit: Visit) -> None:
        """A request ended. If its session is in the sample, both small caches serve it."""
        count = len(visit.prefixes)
        self._pieces += count
        if visit.session * 0x9E3779B97F4A7C15 >> (64 - _SAMPLE_BITS) & (
            (1 << _SAMPLE_BITS) - 1
        ):
            return
        self._sampled += count
        room = round(self._orders[0].resident_blocks / visit.blocks_per_piece * self.share)
        if not room:
            return
        mine, theirs = self._caches(room)
        found = mine.serve(visit, room), theirs.serve(visit, room)
        self._seen = self._seen * _MEMORY + count
        self._lead = self._lead * _MEMORY + found[1] - found[0]
        self._spread = self._spread * _MEMORY + (found[1] - found[0]) ** 2
        self._judge()

    def _caches(self, room: int) -> "tuple[_Small, _Small]":
        if self._small is None or self._small[0].max_room < room:
            size = 2 * room + _LONGEST
            mine = _Small(size, _Follower(self._retention, Tier.DEVICE))
            self._small = mine, _Small(size, Lru())
        return self._small

    def _judge(self) -> None:
        cautious = self._orders[0].cautious
        if self._lead > max(_TOLERANCE * self._seen, _SURE * sqrt(self._spread)):
            cautious = True
        elif self._lead < _RELIEF * self._seen:
            cautious = False
        for order in self._orders:
            order.cautious = cautious


class _Follower(SessionPolicy):
    """The session policy over runs that the real policy has marked."""

    runs: Sequence[MarkedRun] = ()

    def visit(self, lease: Lease, finished: FinishedRequest, now: float) -> Sequence[MarkedRun]:
        return self.runs


class _Small:
    """A small cache whose blocks are the numbers of prefixes; its size can be changed."""

    def __init__(self, size: int, order: Lru | _Follower) -> None:
        self.max_room = size - _LONGEST
        self._order = order
        config = CacheConfig(
            device_blocks=size,
            block_tokens=_BLOCK_TOKENS,
            write_policy=WritePolicy.NONE,
            max_ghosts=0,
        )
        self._cache = TieredCache(config, Orders(order, Lru()))

    def serve(self, visit: Visit, room: int) -> int:
        """Serve a request and return how many of its pieces were found."""
        cache, now = self._cache, visit.now
        numbers = np.array(visit.prefixes[:_LONGEST], dtype=np.uint64)
        path = TokenPath(numbers.view(np.int32))
        lease = cache.lease(cache.match(path), owner=RequestId(""), now=now)
        found = lease.num_blocks
        slots = cache.take(len(numbers) - found, now=now)
        if slots is not None:
            cache.commit(lease, path, slots, now=now)
        if isinstance(self._order, _Follower):
            self._order.runs = visit.runs
        cache.release(lease, now=now, finished=FinishedRequest(0, 0))
        cache.trim(room)
        return found
