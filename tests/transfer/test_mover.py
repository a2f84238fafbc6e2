"""Jobs: a deadline each, one outcome each, and quiet after a time-out."""

import numpy as np
import pytest

from headwater.cache import (
    JobOutcome,
    JobStatus,
    KeyScheme,
    LoadJob,
    Lookup,
    OffloadJob,
    TokenPath,
)
from headwater.clock import VirtualClock
from headwater.errors import ConfigError, InvariantError
from headwater.storage.codec import BlockFormat
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.testing.copiers import EchoCopier, HeldWorkers
from headwater.testing.runners import EchoRunner
from headwater.transfer.completions import JobCompletion
from headwater.transfer.mover import Mover, TransferConfig
from headwater.transfer.slab import HostSlab
from headwater.types import EMPTY, BlockKey, JobId, LinkRate, Tier

SCHEME = KeyScheme(block_tokens=4)


def make_load(job: int, slots=(0, 1)) -> LoadJob:
    return LoadJob(
        job=JobId(job),
        source=Tier.HOST,
        target=Tier.DEVICE,
        source_slots=np.array(slots),
        target_slots=np.array(slots),
    )


def make_write(job: int) -> OffloadJob:
    return OffloadJob(
        job=JobId(job),
        source=Tier.HOST,
        target=Tier.STORAGE,
        source_slots=np.array([0]),
        target_slots=EMPTY,
        keys=(BlockKey(bytes([job]) * 32),),
        parent=BlockKey(bytes(32)),
    )


def make_lookup(job: int) -> Lookup:
    return Lookup(job=JobId(job), questions=((TokenPath([1, 2, 3, 4] * 2), 2),), scheme=SCHEME)


class MoverHarness:
    """A mover whose executors work when the test says so."""

    def __init__(self) -> None:
        runner = EchoRunner(num_blocks=8, block_tokens=4)
        slab = HostSlab(8, 32)
        self.clock = VirtualClock()
        form = BlockFormat(fingerprint=bytes(32), block_bytes=32)
        self.storage = MemoryStorage(MemoryConfig(), form)
        self.copier = EchoCopier(runner, slab, held=True)
        self.workers = HeldWorkers(self.storage, slab, self.clock, held=True)
        config = TransferConfig(copy_timeout_s=1.0, lookup_timeout_s=0.5, write_timeout_s=2.0)
        self.mover = Mover(self.copier, self.workers, config)

    def start(self, *plans) -> None:
        self.mover.start(plans, now=self.clock.now())

    def take(self) -> list[tuple[int, JobStatus]]:
        return [(o.job, o.status) for o in self.mover.take(now=self.clock.now())]


def test_each_job_has_one_outcome():
    """Lesson 20: started is not done; the end is reported once and counted once."""
    harness = MoverHarness()
    harness.start(make_load(1), make_load(2))
    assert harness.take() == []
    assert harness.mover.num_in_flight == 2

    harness.copier.finish(JobId(2))
    assert harness.mover.has_news(0.0)
    assert harness.take() == [(2, JobStatus.DONE)]
    assert harness.take() == []
    harness.copier.finish(JobId(1))
    assert harness.take() == [(1, JobStatus.DONE)]

    totals = harness.mover.links["host_to_device"]
    assert (totals.num_jobs, totals.num_blocks, totals.in_flight) == (2, 4, 0)
    assert harness.mover.wake_s is None


def test_a_deadline_then_quiet():
    """Lesson 50: after TIMED_OUT the job's slots stay quarantined until QUIET, whatever its
    executor reports meanwhile."""
    harness = MoverHarness()
    harness.start(make_load(1))
    assert [harness.mover.wake_s] == [1.0]
    harness.clock.advance(0.9)
    assert not harness.mover.has_news(harness.clock.now())
    harness.clock.advance(0.1)

    assert harness.mover.has_news(harness.clock.now())
    assert harness.take() == [(1, JobStatus.TIMED_OUT)]
    assert harness.take() == []
    assert harness.mover.wake_s is None
    harness.copier.finish(JobId(1))
    assert harness.take() == [(1, JobStatus.QUIET)]
    assert harness.mover.links["host_to_device"].failures == {"timeout": 1}


def test_a_task_that_no_thread_began_is_quiet_at_once():
    """Lesson 17: no caller waits for a worker that will not answer, and the task never
    begins."""
    harness = MoverHarness()
    harness.start(make_write(1))
    harness.clock.advance(2.0)

    assert harness.take() == [(1, JobStatus.TIMED_OUT), (1, JobStatus.QUIET)]
    harness.workers.work_off()

    assert harness.take() == []
    assert harness.storage.stats().num_blocks == 0


def test_a_begun_write_is_quiet_when_it_returns():
    """The source of the write stays pinned until then, or another block would be stored under
    its key."""
    harness = MoverHarness()
    harness.start(make_write(1))
    (task,) = harness.workers.tasks
    assert task.claim()
    harness.clock.advance(2.0)
    assert harness.take() == [(1, JobStatus.TIMED_OUT)]

    harness.workers.run(task)

    assert harness.take() == [(1, JobStatus.QUIET)]


def test_a_lookup_is_answered_or_given_up():
    """A lookup holds nothing, so a late answer is ignored."""
    harness = MoverHarness()
    first, late = make_lookup(1), make_lookup(2)
    (keys,) = first.runs()
    harness.storage.write(
        keys[:1], [memoryview(bytes(32))], parents=[BlockKey(bytes(32))], timeout_s=1
    )
    harness.start(first)
    harness.workers.work_off()
    assert harness.mover.take(now=0.0) == [
        JobOutcome(job=JobId(1), status=JobStatus.DONE, found=(1,))
    ]

    harness.start(late)
    (task,) = harness.workers.tasks
    assert task.claim()
    harness.clock.advance(0.5)
    assert harness.take() == [(2, JobStatus.TIMED_OUT)]
    harness.workers.run(task)

    assert harness.take() == []
    assert harness.mover.num_in_flight == 0


def test_one_failed_job_does_not_poison_the_next():
    """Lesson 24: a failed copy ends its own job only; the next job is copied."""
    harness = MoverHarness()
    harness.start(make_load(1), make_load(2))

    harness.copier.finish(JobId(1), num_blocks=0)
    harness.copier.finish(JobId(2))

    assert harness.take() == [(1, JobStatus.FAILED), (2, JobStatus.DONE)]
    assert harness.mover.links["host_to_device"].failures == {"error": 1}


def test_a_completion_of_nothing_is_ignored():
    """Lesson 17: late and duplicate completions change nothing."""
    harness = MoverHarness()
    harness.start(make_load(1))
    harness.copier.finish(JobId(1))

    harness.mover.completions.put(JobCompletion(JobId(1), JobStatus.DONE, 2))
    harness.mover.completions.put(JobCompletion(JobId(99), JobStatus.FAILED))

    assert harness.take() == [(1, JobStatus.DONE)]


def test_an_executor_may_time_out_by_itself():
    """A backend that stopped waiting reports the time-out once, before it is quiet."""
    harness = MoverHarness()
    harness.start(make_load(1))
    harness.mover.completions.put(JobCompletion(JobId(1), JobStatus.TIMED_OUT))
    harness.mover.completions.put(JobCompletion(JobId(1), JobStatus.TIMED_OUT))

    assert harness.take() == [(1, JobStatus.TIMED_OUT)]
    harness.clock.advance(5.0)
    assert harness.take() == []
    harness.copier.finish(JobId(1))
    assert harness.take() == [(1, JobStatus.QUIET)]


def test_without_tiers_no_plan_may_need_them():
    """A plan that cannot be executed is a bug, and is detected at once."""
    with pytest.raises(InvariantError, match="host tier"):
        Mover().start([make_load(1)], now=0.0)
    with pytest.raises(InvariantError, match="storage"):
        Mover().start([make_write(1)], now=0.0)


def test_a_rate_comes_from_jobs_that_ended_well():
    """Failed jobs say nothing about speed."""
    harness = MoverHarness()
    harness.start(make_load(1))
    report = harness.copier.pending.pop(JobId(1))[1]
    report(JobCompletion(JobId(1), JobStatus.DONE, 2, busy_s=0.5))
    harness.take()

    assert harness.mover.rate("host_to_device", now=0.0) == LinkRate(0.0, 0.25)
    assert harness.mover.rate("storage_to_host", now=0.0) is None


def test_closing_twice_is_safe():
    """Closing waits for nothing."""
    harness = MoverHarness()
    harness.start(make_load(1))

    harness.mover.close()
    harness.mover.close()

    assert harness.copier.closed


def test_a_timeout_of_zero_is_refused():
    """Every timeout must be positive."""
    with pytest.raises(ConfigError, match="read_timeout_s"):
        TransferConfig(read_timeout_s=0)
