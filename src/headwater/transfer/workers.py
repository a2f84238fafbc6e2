"""Threads that call a storage backend, so that the engine loop never waits for it.

A call blocks in the system or in C, without the interpreter lock. The threads are daemons: a
thread that hangs in a dead backend delays neither the loop nor the end of the process. A thread
whose call passes its deadline is lost until that call returns; another thread replaces it, up
to a bound.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock, Thread

from headwater.cache import JobStatus, LoadJob, Lookup, Removal, TransferJob
from headwater.clock import Clock
from headwater.errors import StorageError, StorageTimeout, StorageUnavailable
from headwater.storage.base import BlockRead, BlockWrite, StorageBackend, StorageStats
from headwater.storage.calls import check_count, check_counts, check_outcomes
from headwater.transfer.completions import JobCompletion
from headwater.transfer.slab import HostSlab

log = logging.getLogger(__name__)

Plan = TransferJob | Lookup | Removal
"""Plans that can be started here. The device copier does transfers between device and host."""

Report = Callable[[JobCompletion], None]
"""Called when a job ends, from any thread."""

_KINDS = ("lookup", "read", "write")
"""Each kind of call has its own threads, so that slow writes never delay a read."""

MAX_LOST = 6
"""Lost threads of one kind that are replaced. Each may keep the host slots of its call."""


class Task:
    """A plan on its way to a thread. Either a thread begins it or the loop abandons it, never
    both."""

    def __init__(self, plan: Plan, report: Report, deadline_s: float) -> None:
        self.plan = plan
        self.report = report
        self.deadline_s = deadline_s
        self.is_lost = False
        """Whether its thread was given up because the call passed its deadline."""
        self.has_ended = False
        self._unclaimed = [True]

    def claim(self) -> bool:
        """True for the first caller only. The first caller decides what happens to the plan."""
        try:
            return self._unclaimed.pop()  # one atomic operation, so only one thread gets it
        except IndexError:
            return False


class StorageWorkers:
    """Executes plans that read, write or query a `StorageBackend`. Owns the backend."""

    def __init__(
        self, backend: StorageBackend, slab: HostSlab, clock: Clock, *, num_threads: int = 2
    ) -> None:
        """There are `num_threads` threads for each kind of call."""
        self.backend = backend
        self.slab = slab
        self._clock = clock
        self._num_threads = num_threads
        self.num_parallel = max(num_threads, 1)
        self._queues: dict[str, SimpleQueue[Task | None]] = {}
        self._lock = Lock()
        self._num_alive = dict.fromkeys(_KINDS, 0)
        """Threads that take tasks, by kind."""
        self._num_lost = dict.fromkeys(_KINDS, 0)
        for kind in _KINDS:
            self._queues[kind] = SimpleQueue()
            for _ in range(num_threads):
                self._start_thread(kind)

    def start(self, tasks: Sequence[Task]) -> None:
        """Start tasks as soon as threads are free. `report` is called once for each task, at
        its end."""
        for task in tasks:
            kind = _kind(task.plan)
            if self._num_alive[kind]:
                self._queues[kind].put(task)
            elif task.claim():
                # No thread would take the tasks, and the queue would only grow.
                task.report(
                    JobCompletion(task.plan.job, JobStatus.FAILED, reason="threads_lost")
                )

    def give_up(self, task: Task) -> None:
        """Do not wait for the thread that runs `task` any more: its call has passed its
        deadline. Another thread replaces it, unless MAX_LOST threads of this kind are lost
        already."""
        kind = _kind(task.plan)
        with self._lock:
            if task.is_lost or task.has_ended:
                return
            task.is_lost = True
            self._num_alive[kind] -= 1
            self._num_lost[kind] += 1
            replaced = self._num_lost[kind] <= MAX_LOST
        if replaced:
            self._start_thread(kind)

    def replace(self, backend: StorageBackend) -> None:
        """Use another backend from now on. No call to the old one may be in flight."""
        old, self.backend = self.backend, backend
        old.close()

    def stats(self) -> StorageStats:
        """The statistics of the backend and the number of lost threads. Never blocks."""
        stats = self.backend.stats()
        lost = sum(self._num_lost.values())
        return replace(stats, threads_lost=stats.threads_lost + lost) if lost else stats

    def close(self) -> None:
        """Let each thread end after its current task; wait for none. Calling it twice is
        safe."""
        for kind, queue in self._queues.items():
            for _ in range(self._num_alive[kind]):
                queue.put(None)
        self.backend.close()

    def run(self, task: Task) -> None:
        """Execute a task that the caller has claimed, and report its end."""
        began, job = self._clock.now(), task.plan.job
        try:
            ended = self._call(task.plan, max(task.deadline_s - began, 0.001))
        except StorageTimeout as error:
            if error.quiet is not None and not error.quiet.is_set():
                # The backend stopped waiting, but its call may still touch the slots.
                task.report(JobCompletion(job, JobStatus.TIMED_OUT, reason="timeout"))
                self.give_up(task)
                error.quiet.wait()
            ended = JobCompletion(job, JobStatus.FAILED, reason="timeout")
        except StorageUnavailable:  # logged when the breaker opened
            ended = JobCompletion(job, JobStatus.FAILED, reason="breaker_open")
        except StorageError as error:
            log.warning("storage: %s", error)
            ended = JobCompletion(job, JobStatus.FAILED, reason="error")
        except Exception:
            log.exception("storage backend raised an error that is not a StorageError")
            ended = JobCompletion(job, JobStatus.FAILED, reason="bug")
        task.report(ended._replace(busy_s=self._clock.now() - began))

    def _start_thread(self, kind: str) -> None:
        with self._lock:
            self._num_alive[kind] += 1
        Thread(target=self._work, args=(kind,), name=f"storage-{kind}", daemon=True).start()

    def _work(self, kind: str) -> None:
        queue = self._queues[kind]
        while (task := queue.get()) is not None:
            if task.claim():
                self.run(task)
                if not self._goes_on(task, kind):
                    return
            del task  # it holds a plan, and the next task may come much later

    def _goes_on(self, task: Task, kind: str) -> bool:
        """Whether the thread that ran `task` takes another one. A thread that was given up
        continues only if no other thread has replaced it."""
        with self._lock:
            task.has_ended = True
            if not task.is_lost:
                return True
            self._num_lost[kind] -= 1
            goes_on = self._num_alive[kind] < self._num_threads
            self._num_alive[kind] += goes_on
            return goes_on

    def _call(self, plan: Plan, timeout_s: float) -> JobCompletion:
        if isinstance(plan, Lookup):
            runs = plan.runs()
            found = check_counts(self.backend.contains(runs, timeout_s=timeout_s), runs)
            return JobCompletion(plan.job, JobStatus.DONE, found=tuple(found))
        if isinstance(plan, Removal):
            removed = check_count(self.backend.remove(None, timeout_s=timeout_s), "remove")
            return JobCompletion(plan.job, JobStatus.DONE, removed)
        if isinstance(plan, LoadJob):
            return self._read(plan, timeout_s)
        return self._write(plan, timeout_s)

    def _read(self, plan: TransferJob, timeout_s: float) -> JobCompletion:
        into = self.slab.views(plan.target_slots.tolist())
        answer = self.backend.read(plan.keys, into, timeout_s=timeout_s)
        results = check_outcomes(answer, BlockRead, plan.num_blocks, "read")
        good = _leading(results, {BlockRead.READ})
        if good == plan.num_blocks:
            return JobCompletion(plan.job, JobStatus.DONE, good)
        if results[good] is BlockRead.DAMAGED:
            return JobCompletion(plan.job, JobStatus.DAMAGED, good, reason="damaged")
        return JobCompletion(plan.job, JobStatus.ABSENT, good, reason="absent")

    def _write(self, plan: TransferJob, timeout_s: float) -> JobCompletion:
        blocks = self.slab.views(plan.source_slots.tolist())
        before = () if plan.parent is None else (plan.parent,)
        answer = self.backend.write(
            plan.keys, blocks, parents=(*before, *plan.keys[:-1]), timeout_s=timeout_s
        )
        results = check_outcomes(answer, BlockWrite, plan.num_blocks, "write")
        good = _leading(results, {BlockWrite.WRITTEN, BlockWrite.PRESENT})
        if good == plan.num_blocks:
            return JobCompletion(plan.job, JobStatus.DONE, good)
        return JobCompletion(plan.job, JobStatus.PARTIAL, good, reason="refused")


def _kind(plan: Plan) -> str:
    if isinstance(plan, Lookup):
        return "lookup"
    return "read" if isinstance(plan, LoadJob) else "write"


def _leading(results: list[BlockRead] | list[BlockWrite], good: set[object]) -> int:
    """Number of successful results before the first failure."""
    return next((i for i, result in enumerate(results) if result not in good), len(results))
