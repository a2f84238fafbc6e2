"""The tiered prefix cache: decides where blocks are, never moves them.

Pure: no I/O, no threads, no clock. Callers pass `now` and get back values that say what to
move. One thread calls it; nothing here waits, and nothing is locked.
"""

from collections.abc import Iterable

import numpy as np

from headwater.cache.audit import audit
from headwater.cache.config import CacheConfig
from headwater.cache.evictor import Evictor
from headwater.cache.ghosts import Ghosts
from headwater.cache.inflight import InFlightPrefixes
from headwater.cache.keys import KeyScheme, Namespace, TokenPath
from headwater.cache.kv_event_log import KVEventLog
from headwater.cache.lease import Lease
from headwater.cache.ledger import Ledger
from headwater.cache.matcher import Matcher
from headwater.cache.node import Node
from headwater.cache.pins import Pins
from headwater.cache.plan import Demotion, JobEffect, JobOutcome, Lookup, Match, Promotion
from headwater.cache.policy import FinishedRequest, Orders, Shape, make_orders
from headwater.cache.pool import SlotState
from headwater.cache.publisher import Publisher
from headwater.cache.sessions import SessionEntry, Sessions
from headwater.cache.stats import CacheStats
from headwater.cache.tier_pool import TierPool
from headwater.cache.transfers import Transfers
from headwater.cache.tree import PrefixTree
from headwater.errors import CacheUseError, StaleLease
from headwater.types import EMPTY, BlockKey, RequestId, Slots, Tier


class TieredCache:
    """A prefix tree over device, host and storage, with the slots of both pools.

    Life of a device block, and the only ways to change it:

        free --take--> held --commit--> cached --eviction, inside take--> free
                       held --free, release--> free

    Invariants, verified by `check()`: each slot is free, held, cached, moving or quarantined,
    never two; a block in a tier has its parent in that tier or above; a leased block is never
    evicted; no transfer is without an end; a block is findable only after commit.
    """

    def __init__(self, config: CacheConfig, orders: Orders | None = None) -> None:
        """`orders`, where given, are instead of those that `config.eviction` names."""
        self.config = config
        self.block_tokens = config.block_tokens
        scheme = KeyScheme(
            block_tokens=config.block_tokens,
            fingerprint=config.fingerprint,
            kv_format=config.kv_format,
            shard=config.shard,
        )
        if orders is None:
            shape = Shape(
                config.device_blocks, config.host_blocks, config.block_tokens, config.weights
            )
            orders = make_orders(config.eviction, shape)
        self.tree = PrefixTree(scheme)
        self.device = TierPool(Tier.DEVICE, config.device_blocks, orders.device)
        self.host = TierPool(Tier.HOST, config.host_blocks, orders.host)
        self.ghosts = Ghosts(config.max_ghosts)
        self.events = KVEventLog(self.tree) if config.record_events else None
        """What changed, for those who follow the cache; None where nobody asked."""
        self.evictor = Evictor(
            self.tree,
            self.device,
            self.host,
            self.ghosts,
            config.max_stored_nodes,
            self.events,
        )
        self.pins = Pins(self.tree, self.device, self.host)
        self.in_flight = InFlightPrefixes(self.tree)
        self.transfers = Transfers(
            config, self.tree, self.device, self.host, self.pins, self.evictor, self.events
        )
        self._writes = self.transfers.writes
        self._matcher = Matcher(self.tree, self.in_flight, self.ghosts)
        self._publisher = Publisher(
            self.tree, self.device.pool, self.pins, self.ghosts, self._writes, self.events
        )
        self.leases: dict[Lease, None] = {}
        self.sessions = Sessions(round(config.hint_share * config.device_blocks))
        self.generation = 0
        self._ledger = Ledger(config.block_tokens)

    @property
    def num_available(self) -> int:
        """Device blocks that `take` could deliver now."""
        return self.device.pool.num_free + self.device.evictable

    def is_current(self, match: Match) -> bool:
        """Whether nothing has changed since `match` was made, here and of this tree."""
        return match.version == (self.tree, self.tree.version)

    def available_beside(self, match: Match) -> int:
        """Device blocks that `take` could deliver once `match` is leased: found blocks that
        nobody has pinned are available now, and would be no longer."""
        left, kept = match.device_blocks, 0
        for node in match.nodes:
            count = min(left, len(node.device))
            left -= count
            if not node.pins:
                kept += count
        return self.num_available - kept

    def match(self, path: TokenPath, max_blocks: int | None = None) -> Match:
        """How far `path` is cached, in at most `max_blocks` blocks. Changes nothing.

        To sample the next token of n tokens, ask for at most (n - 1) // block_tokens: the
        last token must be computed, whatever is cached.
        """
        limit = len(path.tokens) // self.block_tokens
        if max_blocks is not None:
            if max_blocks < 0:
                raise CacheUseError(f"cannot match {max_blocks} blocks")
            limit = min(limit, max_blocks)
        return self._matcher.match(path, limit)

    def lease(
        self,
        match: Match,
        *,
        owner: RequestId,
        now: float,
        counted: bool = True,
        expires_s: float | None = None,
    ) -> Lease:
        """Pin the device part of `match` until it is released, or `expires_s` has come.

        A match that is not current is made again first, so a lease is never on blocks that
        went meanwhile. With `counted` the match goes into the ledger and counts as a hit.
        """
        tree, version = match.version
        if version != self.tree.version or tree is not self.tree:
            match = self.match(match.path, match.max_blocks)
        if counted:
            self._ledger.record(match)
        node, parts = self._claim(match, now)
        lease = Lease(owner, node, match.device_blocks, match.path, now, expires_s)
        if parts:
            lease.slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.pins.pin(node)
        self.leases[lease] = None
        if counted:
            self._writes.hit(node)
        return lease

    def take(self, count: int, *, now: float) -> Slots | None:
        """Hold `count` device slots, evicting as needed, or change nothing and return None."""
        if count < 0:
            raise CacheUseError(f"cannot take {count} slots")
        return self.evictor.take_device(count, SlotState.HELD)

    def free(self, slots: Slots) -> None:
        """Give back held slots."""
        self.device.pool.free(slots, SlotState.HELD)

    def announce(self, lease: Lease, path: TokenPath) -> None:
        """Say that the lease's owner is computing the blocks of `path` beyond the lease."""
        self._require_live(lease)
        if not lease.node.gone:
            self.in_flight.announce(lease, path)

    def commit(self, lease: Lease, path: TokenPath, slots: Slots, *, now: float) -> Slots:
        """Publish the next blocks of `path`, whose KV is written in the held `slots`.

        They are blocks [lease.num_blocks, lease.num_blocks + len(slots)); the lease covers
        them from here on. Returns the surplus: slots of blocks that were published already,
        which stay held by the caller. After a reset everything is surplus. The tree keeps
        the array it is given, so it must not be changed afterwards.
        """
        if lease not in self.leases:
            self._require_live(lease)
        start, count = lease.num_blocks, len(slots)
        if not count:
            return EMPTY
        if (start + count) * self.block_tokens > len(path.tokens):
            raise CacheUseError(
                f"blocks up to {start + count} cannot be committed: "
                f"the path has {path.num_blocks(self.block_tokens)} full ones"
            )
        if path.namespace is not lease.namespace and path.namespace != lease.namespace:
            raise CacheUseError("a lease cannot commit blocks of another namespace")
        pending = lease.pending
        if pending is not None:
            self.in_flight.withdraw(lease)
        if len(path.tokens) > len(lease.path.tokens):
            lease.path = path
        surplus = slots
        if not lease.node.gone:
            surplus = self._publisher.publish(lease, path, slots, now)
        lease.num_blocks = start + count
        if pending is not None:
            self.in_flight.announce(lease, pending)
        return surplus

    def release(
        self,
        lease: Lease,
        *,
        now: float,
        slots: Slots | None = None,
        turn: FinishedRequest | None = None,
    ) -> None:
        """End a lease; its blocks are the most recently used. Held `slots` go back with it.

        `turn` says that the request has ended, and what it was: eviction may learn from it.
        """
        if lease not in self.leases:
            self._require_live(lease)
        if slots is not None:
            self.device.pool.free(slots, SlotState.HELD)
        if lease.pending is not None:
            self.in_flight.withdraw(lease)
        del self.leases[lease]
        if turn is None or lease.node.gone:
            self.pins.release(lease.node, now=now)
        elif turn.session and lease.num_blocks:
            known = self.sessions.note(lease, turn, now)
            self._end_turn(lease, turn._replace(hint=known.hint), now)
            if known.hint is not None and known.hint.closed:
                self.pins.close(known.node, known.num_shared)
        else:
            self._end_turn(lease, turn, now)

    def close_session(self, namespace: Namespace, name: str) -> bool:
        """Nothing more of this session will come: its own blocks are among the first to go.

        False when it is not known. What it shares with others, or is in use, stays as it is.
        """
        known = self.sessions.close(namespace, name)
        if known is not None:
            self.pins.close(known.node, known.num_shared)
        return known is not None

    def match_session(self, known: SessionEntry) -> Match:
        """How far the path of a session is cached, as far as the tree still knows it."""
        path = self.tree.path_to(known.node, known.namespace)
        return self.match(path)

    def trim(self, max_cached: int) -> int:
        """Evict device blocks until at most `max_cached` are cached; return how many went.

        What is leased stays, so more than that may be left.
        """
        return self.evictor.trim_device(self.device.pool.stats().cached - max_cached)

    def trim_host(self) -> int:
        """Evict every host block that no transfer uses; return how many went."""
        return self.evictor.evict_host(self.host.pool.stats().cached)

    def expire(self, now: float) -> list[Lease]:
        """Release the leases whose time has come, and return them."""
        over = [le for le in self.leases if le.expires_s is not None and le.expires_s <= now]
        for lease in over:
            self.release(lease, now=now)
        return over

    def save(self, lease: Lease) -> None:
        """Ask for the leased blocks to be demoted soon, whatever the write policy."""
        self._require_live(lease)
        self._writes.save(lease.node)

    def promote(self, match: Match, *, limit_blocks: int, now: float) -> Promotion | None:
        """Plan to bring the next part of `match` one tier up; None if nothing can be.

        Host to device when blocks on the host follow, else storage to host. All or nothing
        for what it plans; None as well while the same blocks are on their way already.
        """
        _require_limit(limit_blocks)
        if not self.is_current(match):
            match = self.match(match.path, match.max_blocks)
        return self.transfers.promote(match, limit_blocks, now=now)

    def demote(
        self, *, limit_blocks: int, now: float, limit_stored: int | None = None
    ) -> list[Demotion]:
        """Plan the writes to lower tiers that the write policy wants by now.

        At most `limit_blocks` to the host and `limit_stored` to storage; without the latter,
        what the host leaves of `limit_blocks`.
        """
        _require_limit(limit_blocks)
        plans = self.transfers.demote(limit_blocks, now=now)
        if limit_stored is None:
            limit_stored = limit_blocks - sum(plan.num_blocks for plan in plans)
        return plans + self.transfers.demote_stored(limit_stored)

    def land(self, outcome: JobOutcome, *, now: float) -> JobEffect:
        """Take the end of a transfer. Never fails; late and duplicate ends change nothing."""
        return self.transfers.land(outcome, now=now)

    def look_up(self, questions: Iterable[tuple[TokenPath, int]]) -> Lookup:
        """Plan to ask storage, of each path, how many of its first so many blocks it has.

        The answers are for `learn_stored`. Nothing waits for them here, and nothing changed.
        """
        asked = tuple(questions)
        for path, num_blocks in asked:
            if not 0 < num_blocks <= path.num_blocks(self.block_tokens):
                raise CacheUseError(f"the path does not have {num_blocks} full blocks")
        job = self.transfers.jobs.new_id()
        return Lookup(job=job, questions=asked, scheme=self.tree.scheme)

    def learn_stored(self, path: TokenPath, num_blocks: int, *, now: float) -> None:
        """Storage said that it has the first `num_blocks` blocks of `path`."""
        if not 0 <= num_blocks <= path.num_blocks(self.block_tokens):
            raise CacheUseError(f"the path does not have {num_blocks} full blocks")
        self.transfers.learn_stored(path, num_blocks, self._publisher.make_child, now=now)

    def keys(self, path: TokenPath, num_blocks: int) -> list[BlockKey]:
        """Content keys of the first `num_blocks` blocks; those in the tree are remembered."""
        nodes, found = self.tree.walk(path, num_blocks)
        keys = [key for node in nodes for key in self.tree.keys(node)][:found]
        last = keys[-1] if keys else self.tree.scheme.root(path.namespace)
        stride = self.block_tokens * 4
        media = path.media and {i - found: m for i, m in path.media.items()}
        rest = path.view[found * stride : num_blocks * stride]
        return keys + self.tree.scheme.chain(last, rest, media)

    def reset(self) -> None:
        """Forget everything that is cached. Leased blocks stay with their leases, unfindable;
        transfers in flight only release what they hold when they land."""
        self.generation += 1
        self.in_flight.clear()
        self._writes.clear()
        self.ghosts.clear()
        self.pins.retire_all()
        self.sessions.clear()
        if self.events is not None:
            self.events.cleared()

    def rekey(self, scheme: KeyScheme) -> None:
        """Other weights: forget everything, and name what comes by other keys."""
        self.reset()
        self.tree.scheme = scheme

    def stats(self) -> CacheStats:
        """A snapshot of every count. O(1)."""
        return CacheStats(
            device=self.device.pool.stats(),
            host=self.host.pool.stats(),
            device_evictable=self.device.evictable,
            host_evictable=self.host.evictable,
            evicted_device=self.device.evicted,
            evicted_host=self.host.evicted,
            lost_blocks=self.evictor.lost,
            nodes=self.tree.num_nodes,
            leases=len(self.leases),
            jobs=len(self.transfers.jobs.by_id),
            late_outcomes=self.transfers.late_outcomes,
            generation=self.generation,
            ledger=self._ledger.stats(),
            sessions=self.sessions.stats(),
        )

    def check(self) -> None:
        """Raise InvariantError if any book does not balance. O(everything)."""
        audit(self)

    def _end_turn(self, lease: Lease, turn: FinishedRequest, now: float) -> None:
        """Let go of the path of a request that has ended, marked as the policy says."""
        runs = self.device.order.visit(lease, turn, now)
        if runs:
            self.pins.mark(lease.node, runs, now=now)
        self.pins.release(lease.node, now=now)

    def _claim(self, match: Match, now: float) -> tuple[Node, list[Slots]]:
        """The node at whose end the device part of `match` ends, cut there if need be."""
        left = match.device_blocks
        last = self.tree.root(match.path.namespace)
        parts: list[Slots] = []
        for node in match.nodes:
            if not left:
                break
            last = node if left >= node.num_blocks else self.pins.split(node, left, now)
            parts.append(last.device)
            left -= last.num_blocks
        return last, parts

    def _require_live(self, lease: Lease) -> None:
        if lease not in self.leases:
            raise StaleLease(f"the lease of {lease.owner!r} is not held here")


def _require_limit(limit_blocks: int) -> None:
    if limit_blocks < 0:
        raise CacheUseError(f"cannot plan for {limit_blocks} blocks")
