"""Executors for the mover that work when the test calls them, and can make every mistake.

They copy the bytes that an `EchoRunner` reads, so a block that is copied too early, too
late or to the wrong place changes the tokens that come out. They need neither torch nor
threads; the test decides what ends when.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headwater.cache import JobStatus, LoadJob, TransferJob
from headwater.clock import Clock
from headwater.storage.base import StorageBackend
from headwater.testing.runners import EchoRunner
from headwater.transfer.completions import JobCompletion
from headwater.transfer.slab import HostSlab
from headwater.transfer.workers import Plan, Report, StorageWorkers, Task
from headwater.types import JobId

_GARBAGE = 0xA5


class EchoCopier:
    """A `DeviceCopier` over the memory of an `EchoRunner`.

    It finishes each job at once, or with `held` when `finish` is called.
    """

    def __init__(self, runner: EchoRunner, slab: HostSlab, *, held: bool = False) -> None:
        self._device = runner.rows
        self._host = slab.rows
        self.held = held
        self.pending: dict[JobId, tuple[TransferJob, Report]] = {}
        """Jobs that are started but not finished, oldest first."""
        self.started: list[TransferJob] = []
        self.fails: Callable[[TransferJob], bool] = lambda transfer: False
        """Decides for a job that is being started whether it will fail."""
        self.will_fail: set[JobId] = set()
        self.block_s = 0.0
        """Seconds of work that it reports for each block."""
        self.closed = False

    def start(self, transfer: TransferJob, report: Report) -> None:
        """Start a job."""
        self.started.append(transfer)
        self.pending[transfer.job] = transfer, report
        if self.fails(transfer):
            self.will_fail.add(transfer.job)
        if not self.held:
            self.finish(transfer.job)

    def finish(self, job: JobId, num_blocks: int | None = None) -> None:
        """Copy the leading `num_blocks` (by default all), leave garbage in the other targets,
        and report the outcome: done, partial or failed."""
        transfer, report = self.pending.pop(job)
        total = transfer.num_blocks
        count = total if num_blocks is None else min(num_blocks, total)
        if job in self.will_fail:
            count = min(count, total - 1)
        source, target = self._sides(transfer)
        target[transfer.target_slots[:count]] = source[transfer.source_slots[:count]]
        target[transfer.target_slots[count:]] = _GARBAGE
        ending = (
            JobStatus.DONE
            if count == total
            else JobStatus.PARTIAL
            if count
            else JobStatus.FAILED
        )
        reason = "" if count == total else "error"
        report(JobCompletion(job, ending, count, busy_s=count * self.block_s, reason=reason))

    def arrive(self, job: JobId) -> None:
        """Copy all layers of `job` now, because a runner waits for them; the job is reported
        later. Layers of a job that will fail are not copied, and the runner continues without
        them."""
        if job in self.pending and job not in self.will_fail:
            transfer, _ = self.pending[job]
            source, target = self._sides(transfer)
            target[transfer.target_slots] = source[transfer.source_slots]

    def scribble(self, job: JobId) -> None:
        """Write garbage to all targets of an unfinished job, as a late executor may do."""
        transfer, _ = self.pending[job]
        self._sides(transfer)[1][transfer.target_slots] = _GARBAGE

    def close(self) -> None:
        """Note that the engine closed the copier."""
        self.closed = True

    def _sides(self, transfer: TransferJob) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        up = isinstance(transfer, LoadJob)
        return (self._host, self._device) if up else (self._device, self._host)


class HeldWorkers(StorageWorkers):
    """Storage workers without threads: a task runs at once, or with `held` in `work_off`."""

    def __init__(
        self, backend: StorageBackend, slab: HostSlab, clock: Clock, *, held: bool = False
    ) -> None:
        super().__init__(backend, slab, clock, num_threads=0)
        self.held = held
        self.tasks: list[Task] = []
        """Tasks that are started but not run, oldest first."""
        self.started: list[Plan] = []

    def start(self, tasks: Sequence[Task]) -> None:
        """Take the tasks of a step."""
        self.started += [task.plan for task in tasks]
        self.tasks += tasks
        if not self.held:
            self.work_off()

    def give_up(self, task: Task) -> None:
        """Nothing to do: there are no threads to replace."""

    def work_off(self) -> None:
        """Run everything that was started and not abandoned."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            if task.claim():
                self.run(task)
