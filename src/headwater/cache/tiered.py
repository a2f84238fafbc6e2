"""The tiered prefix cache: decides where blocks are, never moves them.

Pure: no I/O, no threads, no clock. Callers pass `now` and get values that say what to copy. One
thread calls it; nothing here waits or locks. Callers use the methods of `TieredCache` only; its
parts are private.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from headwater.cache.host_log import AdoptedRun
from headwater.cache.keys import KeyScheme, Namespace, TokenPath
from headwater.cache.node import Node
from headwater.cache.parts import CacheParts
from headwater.cache.plan import (
    JobEffect,
    JobOutcome,
    JobOwner,
    Lease,
    LoadJob,
    Lookup,
    Match,
    OffloadJob,
    Removal,
)
from headwater.cache.policy import FinishedRequest
from headwater.cache.pool import SlotState
from headwater.cache.sessions import SessionEntry
from headwater.errors import CacheUseError, StaleLease
from headwater.types import EMPTY, BlockKey, JobId, RequestId, Slots

_HELD = SlotState.HELD


class TieredCache(CacheParts):
    """A prefix tree over device, host and storage, with the slots of both pools.

    Life of a device block that a sequence fills:

        free --take--> held --commit--> cached --eviction, inside take--> free
                       held --free, release--> free

    Invariants, verified by `check()`: each slot is in exactly one state; a block in a tier has
    its parent in that tier or above; a leased block is never evicted; every job in flight is in
    one table; a block is findable only after commit; every structure is within its bound.
    """

    @property
    def num_available(self) -> int:
        """Device blocks that `take` could deliver now."""
        return self._device.pool.num_free + self._device.evictable

    def is_current(self, match: Match) -> bool:
        """Whether `match` is of this cache and nothing has changed since."""
        return match.version == (self._tree, self._tree.version)

    def available_beside(self, match: Match) -> int:
        """Device blocks that `take` could deliver once `match` is leased. Then the found blocks
        are pinned, so those that are not pinned yet no longer count."""
        left, kept = match.device_blocks, 0
        for node in match.nodes:
            count = min(left, len(node.device))
            left -= count
            if not node.pins:
                kept += count
        return self.num_available - kept

    def match(self, path: TokenPath, max_blocks: int | None = None) -> Match:
        """How far `path` is cached, in at most `max_blocks` blocks. Changes nothing.

        To sample the token after n tokens, ask for at most (n - 1) // block_tokens blocks: the
        last token must be computed even if its block is cached.
        """
        limit = len(path.tokens) // self.block_tokens
        if max_blocks is not None:
            if max_blocks < 0:
                raise CacheUseError(f"max_blocks cannot be negative, got {max_blocks}")
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
        """Pin the device part of `match` until it is released, or until `expires_s`.

        A match that is not current is repeated first, so a lease never refers to blocks that
        were evicted meanwhile. With `counted` the match counts in the statistics of hits and
        misses.
        """
        tree, version = match.version
        if version != self._tree.version or tree is not self._tree:
            match = self.match(match.path, match.max_blocks)
        if counted:
            self._ledger.record(match)
        node, parts = self._claim(match, now)
        lease = Lease(owner, node, match.device_blocks, match.path, now, expires_s)
        if parts:
            lease.slots = self._device.pool.joined(parts)
        self._pins.pin(node)
        self._leases[lease] = None
        if counted:
            self._writes.record_hit(node)
        if len(self._tree.stored_only) > self.config.max_stored_nodes:
            self._evictor.bound_stored()  # a split added a node
        return lease

    def take(self, count: int, *, now: float) -> Slots | None:
        """Hold `count` device slots, evicting as needed, or change nothing and return None."""
        if count < 0:
            raise CacheUseError(f"cannot take {count} slots")
        return self._evictor.take_device(count, _HELD)

    def refresh(self, match: Match, *, now: float) -> None:
        """Make the path of `match`, which a waiting request will use, the most recently used."""
        if match.nodes:
            node = self._pins.want(match, now=now)
            self._residency.touch_host(node, now=now)
            self._evictor.bound_stored()  # a split may have added a node

    def free(self, slots: Slots) -> None:
        """Give back held slots."""
        self._device.pool.free(slots, _HELD)

    def announce(self, lease: Lease, path: TokenPath) -> None:
        """Let `match` report that the owner of `lease` computes the next blocks of `path`."""
        self._require_live(lease)
        if not lease.node.gone:
            self._in_flight.announce(lease, path)

    def commit(self, lease: Lease, path: TokenPath, slots: Slots, *, now: float) -> Slots:
        """Make the next blocks of `path` findable; their KV is in the held `slots`.

        They are blocks [lease.num_blocks, lease.num_blocks + len(slots)); the lease includes
        them afterwards. Returns the surplus: slots of blocks that were published already, which
        the caller still holds. After a reset every slot is surplus. The tree keeps the array,
        so the caller must not change it afterwards.
        """
        if lease not in self._leases:
            self._require_live(lease)
        start, count = lease.num_blocks, len(slots)
        if not count:
            return EMPTY
        if (start + count) * self.block_tokens > len(path.tokens):
            raise CacheUseError(
                f"cannot commit {start + count} blocks: the path has only "
                f"{path.num_blocks(self.block_tokens)} full blocks"
            )
        if path.namespace is not lease.namespace and path.namespace != lease.namespace:
            raise CacheUseError("a lease cannot commit blocks of another namespace")
        pending = lease.pending
        if pending is not None:
            self._in_flight.withdraw(lease)
        if len(path.tokens) > len(lease.path.tokens):
            lease.path = path
        surplus = slots
        if not lease.node.gone:
            surplus = self._publisher.publish(lease, path, slots, now)
            if len(self._tree.stored_only) > self.config.max_stored_nodes:
                self._evictor.bound_stored()  # a split added a node
        lease.num_blocks = start + count
        if pending is not None:
            self._in_flight.announce(lease, pending)
        return surplus

    def release(
        self,
        lease: Lease,
        *,
        now: float,
        slots: Slots | None = None,
        finished: FinishedRequest | None = None,
    ) -> None:
        """End a lease; its blocks become the most recently used. Also frees held `slots`.

        `finished` says that the request has ended, and describes it for the eviction policy.
        """
        if lease not in self._leases:
            self._require_live(lease)
        if slots is not None:
            self._device.pool.free(slots, _HELD)
        if lease.pending is not None:
            self._in_flight.withdraw(lease)
        del self._leases[lease]
        if lease.node.gone:
            self._pins.release(lease.node, now=now)
        elif finished is None:
            self._release_path(lease, now)
        elif finished.session and lease.num_blocks:
            entry = self._sessions.record(lease, finished, now)
            if entry.promised:
                self._pins.expect(lease.node, entry.until_s)
            self._finish_request(lease, finished._replace(hint=entry.hint), now)
            if entry.hint is not None and entry.hint.closed:
                self._pins.close(entry.node, entry.num_shared)
        else:
            self._finish_request(lease, finished, now)

    def close_session(self, namespace: Namespace, name: str) -> bool:
        """No more requests of this session will come: evict its own blocks among the first.

        Blocks that other paths share or that are in use are not affected. Returns False when
        the session is not known.
        """
        entry = self._sessions.close(namespace, name)
        if entry is not None:
            self._pins.close(entry.node, entry.num_shared)
        return entry is not None

    def match_session(self, entry: SessionEntry) -> Match:
        """How far the path of a session is cached, as far as the tree still has it."""
        return self.match(self._tree.path_to(entry.node, entry.namespace))

    def take_due_sessions(self, until_s: float) -> list[SessionEntry]:
        """The sessions expected before `until_s`, earliest first; each is returned once."""
        return self._sessions.take_due(until_s)

    def adopt_host(self, runs: Sequence[AdoptedRun], *, now: float) -> None:
        """Make blocks findable that an earlier engine left in host slots, before any request.
        The list is in path order: each run comes after the run that `before` refers to."""
        if runs:
            slots = np.concatenate([run.slots for run in runs])
            self._host.pool.claim(slots, SlotState.CACHED)
            self._residency.adopt(runs, now=now)

    def trim(self, max_cached: int) -> int:
        """Evict device blocks until at most `max_cached` blocks, or only leased ones, are
        cached; return how many were evicted."""
        return self._evictor.trim_device(self._device.pool.stats().cached - max_cached)

    def trim_host(self) -> int:
        """Evict every host block that no transfer uses; return how many."""
        if self._host_log is not None:
            self._host_log.cleared()
        return self._evictor.evict_host(self._host.pool.stats().cached)

    def expire(self, now: float) -> list[Lease]:
        """Release the leases that have expired, and return them."""
        over = [le for le in self._leases if le.expires_s is not None and le.expires_s <= now]
        for lease in over:
            self.release(lease, now=now)
        return over

    def save(self, lease: Lease) -> None:
        """Queue the leased blocks to be written to the host, whatever the write policy is."""
        self._require_live(lease)
        self._writes.add_path(lease.node)

    def plan_load(
        self, match: Match, *, limit_blocks: int, now: float, owner: JobOwner | None = None
    ) -> LoadJob | None:
        """Plan to copy the next part of `match` one tier up; None if that is not possible.

        Host to device if blocks on the host follow the device part, else storage to host. None
        also while the same blocks are being loaded already.
        """
        _require_limit(limit_blocks)
        if not self.is_current(match):
            match = self.match(match.path, match.max_blocks)
        return self._planner.plan_load(match, limit_blocks, owner, now=now)

    def plan_offloads(
        self,
        *,
        limit_blocks: int,
        now: float,
        limit_stored: int | None = None,
        owner: JobOwner | None = None,
    ) -> list[OffloadJob]:
        """Plan the queued writes to lower tiers.

        At most `limit_blocks` to the host and `limit_stored` to storage. Without
        `limit_stored`, storage gets the part of `limit_blocks` that the host does not use.
        """
        _require_limit(limit_blocks)
        return self._planner.plan_offloads(limit_blocks, limit_stored, owner)

    def plan_lookup(
        self, questions: Iterable[tuple[TokenPath, int]], *, owner: JobOwner | None = None
    ) -> Lookup:
        """Plan to ask storage how many of the first blocks of each path it has.

        `finish_job` adds the blocks that storage has to the tree.
        """
        asked = tuple(questions)
        for path, num_blocks in asked:
            if num_blocks < 1:
                raise CacheUseError(f"a lookup needs at least one block, got {num_blocks}")
            self._require_blocks(path, num_blocks)
            self._tree.recall_keys(path, num_blocks)
        job = self._jobs.new_id()
        plan = Lookup(job=job, questions=asked, scheme=self._tree.scheme, owner=owner)
        self._planner.start(plan)
        return plan

    def plan_removal(self, *, owner: JobOwner | None = None) -> Removal:
        """Plan to remove every block of this deployment from storage."""
        plan = Removal(job=self._jobs.new_id(), owner=owner)
        self._planner.start(plan)
        return plan

    def finish_job(self, outcome: JobOutcome, *, now: float) -> JobEffect:
        """Apply the outcome of a job, then tell its owner.

        Never fails; late and duplicate outcomes change nothing.
        """
        return self._finisher.finish_job(outcome, now=now)

    def defer_job(self, job: JobId) -> None:
        """Keep the outcome of `job` until `resume_job`: a step in flight uses its slots."""
        self._finisher.defer(job)

    def resume_job(self, job: JobId, *, now: float) -> None:
        """Apply what `defer_job` kept. Unknown jobs are ignored."""
        self._finisher.resume(job, now=now)

    def learn_stored(self, path: TokenPath, num_blocks: int, *, now: float) -> None:
        """Record that storage has the first `num_blocks` blocks of `path`."""
        self._require_blocks(path, num_blocks)
        self._publisher.learn_stored(path, num_blocks, now)
        self._evictor.bound_stored()

    def keys(self, path: TokenPath, num_blocks: int) -> list[BlockKey]:
        """Block keys of the first `num_blocks` blocks; keys of cached blocks are remembered."""
        nodes, found = self._tree.walk(path, num_blocks)
        runs = [self._tree.keys(node)[: node.num_blocks] for node in nodes]
        keys = [key for run in runs for key in run][:found]
        last = keys[-1] if keys else self._tree.scheme.root(path.namespace)
        stride = self.block_tokens * 4
        media = path.media and {i - found: m for i, m in path.media.items()}
        rest = path.view[found * stride : num_blocks * stride]
        return keys + self._tree.scheme.chain(last, rest, media)

    def reset(self) -> None:
        """Forget everything that is cached.

        Leased blocks stay with their leases but cannot be found. Jobs in flight only release
        what they hold when they end.
        """
        self.generation += 1
        self._in_flight.clear()
        self._writes.clear()
        self._ghosts.clear()
        self._sessions.clear()
        self._pins.retire_all()
        if self._events is not None:
            self._events.cleared()
        if self._host_log is not None:
            self._host_log.cleared()

    def rekey(self, scheme: KeyScheme) -> None:
        """The model has other weights: forget everything and compute keys by `scheme`."""
        self.reset()
        self._tree.scheme = scheme

    def _finish_request(self, lease: Lease, finished: FinishedRequest, now: float) -> None:
        """Release the path of a request that has ended, marked as the policy decides."""
        runs = self._device.order.visit(lease, finished, now)
        if runs:
            self._pins.mark(lease.node, runs, now=now)
        self._release_path(lease, now)

    def _release_path(self, lease: Lease, now: float) -> None:
        """Unpin the path of `lease`, and queue what lower tiers do not have of it."""
        self._pins.release(lease.node, now=now)
        if self.config.host_blocks:
            self._writes.add_released(lease.node, now)

    def _claim(self, match: Match, now: float) -> tuple[Node, list[Slots]]:
        """The node with which the device part of `match` ends; split there if necessary."""
        left = match.device_blocks
        last = self._tree.root(match.path.namespace)
        parts: list[Slots] = []
        for node in match.nodes:
            if not left:
                break
            last = node if left >= node.num_blocks else self._pins.split(node, left, now)
            parts.append(last.device)
            left -= last.num_blocks
        return last, parts

    def _require_live(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise StaleLease(f"the lease of {lease.owner!r} was released or has expired")

    def _require_blocks(self, path: TokenPath, num_blocks: int) -> None:
        full = path.num_blocks(self.block_tokens)
        if not 0 <= num_blocks <= full:
            raise CacheUseError(f"the path has {full} full blocks, not {num_blocks}")


def _require_limit(limit_blocks: int) -> None:
    if limit_blocks < 0:
        raise CacheUseError(f"limit_blocks cannot be negative, got {limit_blocks}")
