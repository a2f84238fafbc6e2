"""Transfers between tiers: plans as values with a job number, and what their end changes.

Somebody else carries a plan out. Until its job has ended, its slots are neither free nor
findable and its path is pinned; a job that timed out keeps them until its executor is quiet.
"""

from collections.abc import Callable

import numpy as np

from headwater.cache.config import CacheConfig
from headwater.cache.evictor import Evictor
from headwater.cache.jobs import JobRecord, JobTable, Segment, leading
from headwater.cache.keys import TokenPath
from headwater.cache.kv_event_log import KVEventLog
from headwater.cache.node import Node
from headwater.cache.pins import Pins
from headwater.cache.plan import (
    Demotion,
    JobEffect,
    JobOutcome,
    JobStatus,
    Match,
    MissReason,
    Promotion,
)
from headwater.cache.pool import SlotState
from headwater.cache.residency import Residency
from headwater.cache.tier_pool import TierPool
from headwater.cache.tree import PrefixTree
from headwater.cache.write_queue import WriteQueue
from headwater.errors import InvariantError
from headwater.types import EMPTY, BlockKey, Slots, Tier

MakeChild = Callable[[Node, bytes, TokenPath, int], Node]

_LOST = {
    JobStatus.DAMAGED: MissReason.DAMAGED,
    JobStatus.ABSENT: MissReason.EVICTED_STORAGE,
}
"""Endings that say that storage has not what was thought, and why a match will end there."""


class Transfers:
    """Plans promotions and demotions, and lands them."""

    def __init__(
        self,
        config: CacheConfig,
        tree: PrefixTree,
        device: TierPool,
        host: TierPool,
        pins: Pins,
        evictor: Evictor,
        events: KVEventLog | None = None,
    ) -> None:
        self._tree = tree
        self._tier_pools = {Tier.DEVICE: device, Tier.HOST: host}
        self._pins = pins
        self._evictor = evictor
        self._residency = Residency(host, evictor, events)
        self._events = events
        self.writes = WriteQueue(config, device)
        self.jobs = JobTable()
        self.late_outcomes = 0

    def promote(self, match: Match, limit: int, *, now: float) -> Promotion | None:
        """Plan the next part of `match` one tier up, or change nothing and return None."""
        if match.loading is not None:
            return None
        if match.host_blocks:
            return self._from_host(match, min(match.host_blocks, limit))
        return self._from_storage(match, min(match.storage_blocks, limit), now=now)

    def demote(self, limit: int, *, now: float) -> list[Demotion]:
        """Plan up to `limit` blocks of the writes to the host that are wanted."""
        plans: list[Demotion] = []
        if limit <= 0:
            return plans
        for node, cold in self.writes.for_host():
            if limit <= 0:
                break
            start = len(node.host)
            wanted = min(len(node.device) - start, limit)
            target = self._take_host(wanted, keep=node)
            count = 0 if target is None else len(target)
            if count < wanted or start + count == len(node.device):
                self.writes.settle(node)
            if target is None:
                continue
            plan = Demotion(
                job=self.jobs.new_id(),
                source=Tier.DEVICE,
                target=Tier.HOST,
                source_slots=node.device[start : start + len(target)],
                target_slots=target,
            )
            self._pins.pin(node)
            self._start(JobRecord(plan, [Segment(node, start, len(target))], node, cold=cold))
            plans.append(plan)
            limit -= plan.num_blocks
        return plans

    def demote_stored(self, limit: int) -> list[Demotion]:
        """Plan up to `limit` blocks of the writes to storage that are wanted."""
        plans: list[Demotion] = []
        if limit <= 0:
            return plans
        for node in self.writes.for_storage():
            start = node.num_stored
            count = min(len(node.host) - start, limit)
            if count <= 0:
                break
            plan = Demotion(
                job=self.jobs.new_id(),
                source=Tier.HOST,
                target=Tier.STORAGE,
                source_slots=node.host[start : start + count],
                target_slots=EMPTY,
                keys=tuple(self._tree.keys(node)[start : start + count]),
                parent=self._tree.key_before(node, start),
            )
            self._pins.pin(node)
            self._start(JobRecord(plan, [Segment(node, start, count)], node))
            plans.append(plan)
            limit -= count
        return plans

    def land(self, outcome: JobOutcome, *, now: float) -> JobEffect:
        """Attach what arrived, free what did not, and let go of the path."""
        job = self.jobs.by_id.get(outcome.job)
        timed_out = outcome.ending is JobStatus.TIMED_OUT
        if job is None or (timed_out and job.timed_out):
            self.late_outcomes += 1
            return JobEffect.UNKNOWN
        if timed_out:
            self._quarantine(job, now=now)
            return JobEffect.QUARANTINED
        arrived = 0 if job.timed_out else _arrived(job, outcome)
        attached = self._attach(job, arrived)
        if arrived < job.transfer.num_blocks:
            self._give_up(job)
        self._finish(job, now=now)
        if outcome.ending in _LOST and not job.timed_out:
            self._forget_from(job, arrived, _LOST[outcome.ending])
        return JobEffect.ATTACHED if attached else JobEffect.NOTHING

    def learn_stored(self, path: TokenPath, count: int, make: MakeChild, *, now: float) -> None:
        """Storage has the first `count` blocks of `path`; `make` makes nodes for new ones."""
        node, block = self._tree.root(path.namespace), 0
        self._pins.pin(node)
        while block < count:
            first = self._tree.first(path, block)
            child = node.children.get(first)
            if child is None:
                child = make(node, first, path, count - block)
                self._evictor.stored_only[child] = None
            common = self._tree.common(child, path, block, count)
            if common < child.num_blocks:
                child = self._pins.split(child, common, now)
            known, child.num_stored = child.num_stored, common
            if self._events is not None:
                self._events.stored(child, Tier.STORAGE, known, common)
            self._pins.extend(child)
            node, block = child, block + common
        self._pins.release(node, now=now)
        self._evictor.bound_stored()

    def _from_host(self, match: Match, count: int) -> Promotion | None:
        segments = _segments(match, match.device_blocks, count)
        if not segments:
            return None
        device = self._tier_pools[Tier.DEVICE]
        node = segments[-1].node
        missing = count - device.pool.num_free
        if missing > device.evictable - self._pins.withheld_by(node):
            return None
        self._pins.pin(node)
        target = self._evictor.take_device(count, SlotState.MOVING)
        source = [s.node.host[s.start : s.start + s.count] for s in segments]
        return self._promotion(segments, Tier.HOST, joined(source), target)

    def _from_storage(self, match: Match, count: int, *, now: float) -> Promotion | None:
        segments = _segments(match, match.device_blocks + match.host_blocks, count)
        if not segments:
            return None
        first, node = segments[0], segments[-1].node
        if len(first.node.host) != first.start:
            # The device has blocks before it that the host has not: cut, so that what the
            # host gets is the leading part of a node.
            self._pins.split(first.node, first.start, now)
            first.start = 0
        self._pins.pin(node)
        target = self._take_host(count)
        if target is None:
            self._pins.let_go(node, now=now)
            return None
        return self._promotion(segments, Tier.STORAGE, EMPTY, target)

    def _promotion(
        self, segments: list[Segment], source: Tier, slots: Slots, target: Slots | None
    ) -> Promotion:
        """Start a promotion along a path that is pinned already, as far as `target` goes."""
        if target is None:
            raise InvariantError("blocks counted as available could not be taken")
        keys: tuple[BlockKey, ...] = ()
        if source is Tier.STORAGE:
            runs = (self._tree.keys(s.node)[s.start : s.start + s.count] for s in segments)
            keys = tuple(key for run in runs for key in run)[: len(target)]
        plan = Promotion(
            job=self.jobs.new_id(),
            source=source,
            target=Tier(source - 1),
            source_slots=slots,
            target_slots=target,
            keys=keys,
        )
        job = JobRecord(plan, segments, segments[-1].node)
        job.segments = [segment for segment, _ in leading(job, len(target))]
        self._start(job)
        return plan

    def _take_host(self, count: int, keep: Node | None = None) -> Slots | None:
        """Up to `count` host slots, evicting as needed but nothing of `keep`; None when there
        is none."""
        pool = self._tier_pools[Tier.HOST].pool
        if count > pool.num_free:
            self._evictor.evict_host(count - pool.num_free, keep)
        count = min(count, pool.num_free)
        return pool.take(count, SlotState.MOVING) if count > 0 else None

    def _start(self, job: JobRecord) -> None:
        """Put `job` in flight; its path is pinned already. Its nodes leave the host order."""
        host = self._tier_pools[Tier.HOST]
        for segment in job.segments:
            if len(segment.node.host) and not segment.node.jobs:
                host.discard(segment.node)
        self.jobs.start(job)

    def _quarantine(self, job: JobRecord, *, now: float) -> None:
        """Nobody waits for `job` any more; what it may still write to stays out of reach.

        Its path is let go: whatever its executor still reads ends in a quarantined slot. Only
        a write to storage keeps its source, which would otherwise be stored under a wrong key.
        """
        job.timed_out = True
        self._give_up(job)
        tier_pool = self._tier_pools.get(job.transfer.target)
        if tier_pool is None:
            return
        target = job.transfer.target_slots
        tier_pool.pool.move(target, SlotState.MOVING, SlotState.QUARANTINED)
        self.jobs.detach(job)
        self._residency.touch_host(job.node, now=now)
        self._pins.let_go(job.node, now=now, cold=job.cold)

    def _attach(self, job: JobRecord, arrived: int) -> int:
        """Make the first `arrived` blocks findable, and free the other targets."""
        plan = job.transfer
        attached = 0
        for segment, at in leading(job, arrived):
            slots = plan.target_slots[at : at + segment.count]
            if not self._residency.attach(
                segment.node, plan.target, segment.start, segment.count, slots
            ):
                break
            attached += segment.count
        tier_pool = self._tier_pools.get(plan.target)
        if tier_pool is not None:
            old = SlotState.QUARANTINED if job.timed_out else SlotState.MOVING
            tier_pool.pool.move(plan.target_slots[:attached], old, SlotState.CACHED)
            tier_pool.pool.free(plan.target_slots[attached:], old)
        return attached

    def _finish(self, job: JobRecord, *, now: float) -> None:
        """`job` is over: back into the host order with its nodes, and let go of the path."""
        self.jobs.finish(job)
        if job.detached:
            return
        self._residency.touch_host(job.node, now=now)
        if job.transfer.target is Tier.HOST:
            for segment in job.segments:
                self.writes.landed_on_host(segment.node)
        self._pins.let_go(job.node, now=now, cold=job.cold)

    def _give_up(self, job: JobRecord) -> None:
        """A write that failed is not tried again at once, or a broken tier would keep us busy."""
        if isinstance(job.transfer, Demotion):
            for segment in job.segments:
                self.writes.settle(segment.node)

    def _forget_from(self, job: JobRecord, arrived: int, reason: MissReason) -> None:
        """What storage has from block `arrived` of `job` on is not to be used."""
        if job.transfer.source is not Tier.STORAGE:
            return
        at = 0
        for segment in job.segments:
            if arrived < at + segment.count and not segment.node.gone:
                keep = segment.start + arrived - at
                self._evictor.forget_stored(segment.node, keep, reason)
                return
            at += segment.count


def joined(parts: list[Slots]) -> Slots:
    """One array of all parts."""
    return np.concatenate(parts) if parts else EMPTY


def _segments(match: Match, start: int, count: int) -> list[Segment]:
    """Blocks [start, start + count) of the path of `match`, node by node."""
    segments = []
    for node in match.nodes:
        first = max(start - node.start, 0)
        last = min(start + count - node.start, node.num_blocks)
        if first < last:
            segments.append(Segment(node, first, last - first))
    return segments


def _arrived(job: JobRecord, outcome: JobOutcome) -> int:
    """Leading blocks of `job` that are whole in their target."""
    total = job.transfer.num_blocks
    match outcome.ending:
        case JobStatus.DONE:
            return total
        case JobStatus.PARTIAL | JobStatus.DAMAGED | JobStatus.ABSENT:
            return min(max(outcome.num_blocks, 0), total)
        case _:
            return 0
