"""Applies the end of each job to the cache, then tells its owner: the only completion path.

A job that timed out keeps only the slots that its executor may still touch, until the executor
is quiet.
"""

from collections.abc import Callable, Mapping

import numpy as np

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
from headwater.types import EMPTY, JobId, Slots, Tier

LearnStored = Callable[[TokenPath, int, float], None]
"""Records in the tree that storage has the first blocks of a path."""

_LOST = {
    JobStatus.DAMAGED: MissReason.DAMAGED,
    JobStatus.ABSENT: MissReason.EVICTED_STORAGE,
}
"""Outcomes that show that storage does not have a block, and the miss reason of that block."""

_HOST, _STORAGE = Tier.HOST, Tier.STORAGE
_CACHED, _MOVING = SlotState.CACHED, SlotState.MOVING
_QUARANTINED = SlotState.QUARANTINED
_DONE = JobStatus.DONE


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
        self._host = tier_pools[_HOST]
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
        """Attach the blocks that arrived, free the other targets, and release the paths.

        A job that timed out has no segments any more, so its second outcome attaches nothing.
        """
        status = outcome.status
        if status is JobStatus.TIMED_OUT:
            self._time_out(record, plan, now=now)
            self._evictor.bound_stored()
            return JobEffect.QUARANTINED
        num_blocks = plan.num_blocks
        arrived = _num_arrived(num_blocks, outcome)
        attached = self._attach(record, plan, arrived)
        if arrived < num_blocks:
            self._suspend_writes(record)
        self._jobs.remove(record)
        if plan.target is _STORAGE:
            pool = self._host.pool
            pool.end_read(plan.source_slots, record.timed_out)
        if record.ends:
            self._release(record, plan, now=now)
            if arrived < num_blocks and status in _LOST:
                self._forget_from(record, plan, arrived, _LOST[status])
        self._evictor.bound_stored()  # nodes of a job in flight cannot be forgotten
        return JobEffect.ATTACHED if attached else JobEffect.NOTHING

    def _finish_lookup(self, plan: Lookup, outcome: JobOutcome, *, now: float) -> None:
        """Add the blocks that storage has to the tree."""
        if outcome.status is JobStatus.DONE:
            for (path, asked), found in zip(plan.questions, outcome.found, strict=False):
                if found > 0:
                    self._learn_stored(path, min(found, asked), now)
            self._evictor.bound_stored()

    def _time_out(self, record: JobRecord, plan: TransferJob, *, now: float) -> None:
        """The deadline of a job has passed: release everything but the slots that its executor
        may touch.

        Target slots become QUARANTINED, so a late write damages nothing. A copy from the device
        or to the device keeps nothing else: all that its executor still writes goes to
        quarantined slots. A write to storage keeps its host slots marked as read; otherwise
        bytes of another block could be stored under its key. The blocks stay findable.
        """
        record.timed_out = True
        self._suspend_writes(record)
        tier_pool = self._tier_pools.get(plan.target)
        if tier_pool is not None:
            tier_pool.pool.move(plan.target_slots, _MOVING, _QUARANTINED)
        else:
            self._host.pool.lose_read(plan.source_slots)
        segments, ends, pinned = record.segments, record.ends, record.pins_ends
        self._jobs.detach(record)
        for segment in segments:
            self._writes.end_job(segment.node)
        for node in reversed(ends):
            self._residency.touch_host(node, now=now)
            if pinned:
                self._pins.unpin(node, now=now, cold=record.is_still_cold(node))

    def _attach(self, record: JobRecord, plan: TransferJob, arrived: int) -> int:
        """Make the first `arrived` blocks findable and free the other target slots."""
        tier, target = plan.target, plan.target_slots
        attached: list[Slots] = []
        at = num_attached = 0
        for segment in record.segments:
            count = min(segment.count, arrived - at)
            if count <= 0:
                break
            slots = target[at : at + count]
            # Blocks whose parent did not arrive are not attached.
            if self._residency.attach(segment.node, tier, segment.start, count, slots):
                attached.append(slots)
                num_attached += count
            at += segment.count
        if tier is not _STORAGE:
            pool = self._tier_pools[tier].pool
            old = _QUARANTINED if record.timed_out else _MOVING
            if num_attached == len(target):
                pool.move(target, old, _CACHED)
            else:
                used = np.concatenate((EMPTY, *attached))
                pool.move(used, old, _CACHED)
                pool.free(target[~np.isin(target, used)], old)
        return num_attached

    def _release(self, record: JobRecord, plan: TransferJob, *, now: float) -> None:
        """Return the nodes of an ended job to the host order and the write queue, and release
        its pins. The order is reversed, so that the first victim of the job is the first victim
        again."""
        to_host = plan.target is _HOST
        ends = record.ends
        for node in reversed(ends):
            self._residency.touch_host(node, now=now)
        for segment in record.segments:
            self._writes.end_job(segment.node, written_s=now if to_host else None)
        if record.pins_ends:
            self._mark_duplicates(record)
            for node in reversed(ends):
                self._pins.unpin(node, now=now, cold=record.is_still_cold(node))

    def _mark_duplicates(self, record: JobRecord) -> None:
        """Mark the blocks of this job, which are on the device and on the host now, as
        duplicates."""
        window = self._writes.window
        if not window.is_enabled or window.has_everything:
            return  # the device evicts them soon, unless a lease pins them first
        for segment in record.segments:
            if not record.is_still_cold(segment.node):
                self._host.mark_duplicate(segment.node)

    def _suspend_writes(self, record: JobRecord) -> None:
        """Do not repeat a failed write at once: a broken tier must not keep the engine busy."""
        if not isinstance(record.plan, OffloadJob):
            return
        to_storage = record.plan.target is _STORAGE
        suspend = self._writes.suspend_storage if to_storage else self._writes.suspend
        for segment in record.segments:
            suspend(segment.node)

    def _forget_from(
        self, record: JobRecord, plan: TransferJob, arrived: int, reason: MissReason
    ) -> None:
        """Forget that storage has the blocks of the job from `arrived` on."""
        if plan.source is not _STORAGE:
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
    if outcome.status is _DONE:  # the usual case, first because `match` is slower
        return num_blocks
    match outcome.status:
        case JobStatus.PARTIAL | JobStatus.DAMAGED | JobStatus.ABSENT:
            return min(max(outcome.num_blocks, 0), num_blocks)
        case _:
            return 0
