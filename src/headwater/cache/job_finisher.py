"""Applies the end of each job to the cache, then tells its owner: the only completion path.

A job that timed out keeps only the slots that its executor may still touch, until it is quiet.
"""

from collections.abc import Callable, Mapping

from headwater.cache.evictor import Evictor
from headwater.cache.jobs import JobRecord, JobTable
from headwater.cache.keys import TokenPath
from headwater.cache.pins import Pins
from headwater.cache.plan import (
    JobEffect,
    JobOutcome,
    JobStatus,
    Lookup,
    MissReason,
    OffloadJob,
    TransferJob,
)
from headwater.cache.pool import SlotState, TierPool
from headwater.cache.residency import Residency
from headwater.cache.write_queue import WriteQueue
from headwater.types import JobId, Tier

LearnStored = Callable[[TokenPath, int, float], None]
"""Adds to the tree that storage has the first blocks of a path."""

_LOST = {
    JobStatus.DAMAGED: MissReason.DAMAGED,
    JobStatus.ABSENT: MissReason.EVICTED_STORAGE,
}
"""Outcomes that show that storage does not have a block, and the miss reason of that block."""


class JobFinisher:
    """Applies outcomes: attaches blocks, frees slots, releases pins, and tells owners."""

    def __init__(
        self,
        tier_pools: Mapping[Tier, TierPool],
        pins: Pins,
        evictor: Evictor,
        residency: Residency,
        writes: WriteQueue,
        jobs: JobTable,
        learn_stored: LearnStored,
    ) -> None:
        self._tier_pools = tier_pools
        self._pins = pins
        self._evictor = evictor
        self._residency = residency
        self._writes = writes
        self._jobs = jobs
        self._learn_stored = learn_stored
        self.late_outcomes = 0
        """Outcomes of jobs that were not in flight."""

    def finish_job(self, outcome: JobOutcome, *, now: float) -> JobEffect:
        """Apply an outcome and tell the owner of the job. Late outcomes change nothing."""
        record = self._jobs.by_id.get(outcome.job)
        timed_out = outcome.status is JobStatus.TIMED_OUT
        if record is None or (timed_out and record.timed_out):
            self.late_outcomes += 1
            return JobEffect.UNKNOWN
        if record.deferred is not None:
            record.deferred.append(outcome)
            return JobEffect.DEFERRED
        plan = record.plan
        if isinstance(plan, TransferJob):
            effect = self._finish_transfer(record, plan, outcome, now=now)
        else:
            # An executor that answers a lookup after its deadline has no slot to report.
            self._jobs.remove(record)
            effect = JobEffect.NOTHING
            if isinstance(plan, Lookup):
                self._finish_lookup(plan, outcome, now=now)
        if plan.owner is not None:
            plan.owner.finish_job(plan, outcome, now)
        return effect

    def defer(self, job: JobId) -> None:
        """Keep the outcomes of a job until `resume`: a step in flight uses its slots."""
        record = self._jobs.by_id.get(job)
        if record is not None and record.deferred is None:
            record.deferred = []

    def resume(self, job: JobId, *, now: float) -> None:
        """Apply the outcomes that were kept since `defer`."""
        record = self._jobs.by_id.get(job)
        if record is not None and record.deferred is not None:
            outcomes, record.deferred = record.deferred, None
            for outcome in outcomes:
                self.finish_job(outcome, now=now)

    def _finish_transfer(
        self, record: JobRecord, plan: TransferJob, outcome: JobOutcome, *, now: float
    ) -> JobEffect:
        """Attach the blocks that arrived, free the other targets, and release the path.

        A job that timed out has no segments any more, so its second outcome attaches nothing.
        """
        if outcome.status is JobStatus.TIMED_OUT:
            self._time_out(record, plan, now=now)
            self._evictor.bound_stored()
            return JobEffect.QUARANTINED
        num_blocks = plan.num_blocks
        arrived = _num_arrived(num_blocks, outcome)
        attached = self._attach(record, plan, arrived)
        if arrived < num_blocks:
            self._suspend_writes(record)
        self._end(record, plan, now=now)
        lost = None if arrived == num_blocks else _LOST.get(outcome.status)
        if lost is not None:
            self._forget_from(record, plan, arrived, lost)
        self._evictor.bound_stored()  # the job kept its nodes from being forgotten
        return JobEffect.ATTACHED if attached else JobEffect.NOTHING

    def _finish_lookup(self, plan: Lookup, outcome: JobOutcome, *, now: float) -> None:
        """Add the blocks that storage has to the tree."""
        if outcome.status is JobStatus.DONE:
            for (path, asked), found in zip(plan.questions, outcome.found, strict=False):
                if found > 0:
                    self._learn_stored(path, min(found, asked), now)
            self._evictor.bound_stored()

    def _time_out(self, record: JobRecord, plan: TransferJob, *, now: float) -> None:
        """The deadline of a job has passed: release everything but the bytes it may touch.

        Target slots become QUARANTINED, so a late write damages nothing. A copy from the device
        or from the host to the device keeps nothing else: whatever it still reads ends in a
        quarantined slot. A write to storage keeps its host slots marked as read, because bytes
        of another block would be stored under the wrong key; the blocks stay findable.
        """
        record.timed_out = True
        self._suspend_writes(record)
        node, pinned = record.node, record.pins_path
        tier_pool = self._tier_pools.get(plan.target)
        if tier_pool is not None:
            tier_pool.pool.move(plan.target_slots, SlotState.MOVING, SlotState.QUARANTINED)
        nodes = [segment.node for segment in record.segments]
        self._jobs.detach(record)
        for each in nodes:
            self._writes.resume(each)
        self._residency.touch_host(node, now=now)
        if pinned and node is not None:
            self._pins.unpin(node, now=now, cold=record.cold)

    def _attach(self, record: JobRecord, plan: TransferJob, arrived: int) -> int:
        """Make the first `arrived` blocks findable and free the other target slots."""
        attached, target = 0, plan.target_slots
        for segment in record.segments:
            count = min(segment.count, arrived - attached)
            if count <= 0:
                break
            slots = target[attached : attached + count]
            if not self._residency.attach(
                segment.node, plan.target, segment.start, count, slots
            ):
                break
            attached += count
        tier_pool = self._tier_pools.get(plan.target)
        if tier_pool is not None:
            old = SlotState.MOVING
            if record.timed_out:
                old = SlotState.QUARANTINED
            if attached < len(target):
                tier_pool.pool.free(target[attached:], old)
                target = target[:attached]
            if attached:
                tier_pool.pool.move(target, old, SlotState.CACHED)
        return attached

    def _end(self, record: JobRecord, plan: TransferJob, *, now: float) -> None:
        """Remove a job from the table, return its nodes to the host order, and release its
        pins."""
        node, pinned = record.node, record.pins_path
        self._jobs.remove(record)
        if plan.target is Tier.STORAGE:
            self._tier_pools[Tier.HOST].pool.end_read(plan.source_slots)
        if node is None:
            return
        self._residency.touch_host(node, now=now)
        if plan.target is Tier.HOST:
            for segment in record.segments:
                self._writes.add_to_storage(segment.node, now)
        for segment in record.segments:
            self._writes.resume(segment.node)
        self._mark_duplicates(record, plan)
        if pinned:
            self._pins.unpin(node, now=now, cold=record.cold)

    def _mark_duplicates(self, record: JobRecord, plan: TransferJob) -> None:
        """Blocks of this job are on the device and on the host now."""
        window = self._writes.window
        if not window.is_enabled or Tier.DEVICE not in (plan.source, plan.target):
            return
        if record.cold or window.has_everything:
            return  # the device evicts them soon, unless a lease pins them first
        for segment in record.segments:
            self._tier_pools[Tier.HOST].mark_duplicate(segment.node)

    def _suspend_writes(self, record: JobRecord) -> None:
        """A write that failed is not repeated at once: a broken tier must not keep the engine
        busy."""
        if not isinstance(record.plan, OffloadJob):
            return
        to_storage = record.plan.target is Tier.STORAGE
        suspend = self._writes.suspend_storage if to_storage else self._writes.suspend
        for segment in record.segments:
            suspend(segment.node)

    def _forget_from(
        self, record: JobRecord, plan: TransferJob, arrived: int, reason: MissReason
    ) -> None:
        """Do not use what storage has from block `arrived` of the job on."""
        if plan.source is not Tier.STORAGE:
            return
        at = 0
        for segment in record.segments:
            if arrived < at + segment.count and not segment.node.gone:
                keep = segment.start + arrived - at
                self._evictor.forget_stored(segment.node, keep, reason)
                return
            at += segment.count


def _num_arrived(num_blocks: int, outcome: JobOutcome) -> int:
    """Leading blocks of a job of `num_blocks` that were copied completely."""
    match outcome.status:
        case JobStatus.DONE:
            return num_blocks
        case JobStatus.PARTIAL | JobStatus.DAMAGED | JobStatus.ABSENT:
            return min(max(outcome.num_blocks, 0), num_blocks)
        case _:
            return 0
