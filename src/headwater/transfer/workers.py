"""The threads that call a storage backend, so that the engine loop never waits for one.

A call blocks in the system or in C, without the interpreter's lock. The threads are daemons:
one that hangs in a dead backend delays neither the loop nor the end of the process. A thread
whose call passes its deadline is lost until that call returns; another takes its place, up to
a bound.
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
"""What may be started; a transfer between device and host is another's."""

Report = Callable[[JobCompletion], None]
"""Told of the end of a job, from any thread."""

_KINDS = ("lookup", "read", "write")
"""Kinds of calls have threads of their own: slow writes never delay a read."""

MAX_LOST = 6
"""Lost threads of one kind that are replaced. Each may keep the host slots of its call."""


class Task:
    """A plan on its way to a thread. Begun by a thread or abandoned by the loop, never both."""

    def __init__(self, plan: Plan, report: Report, deadline_s: float) -> None:
        self.plan = plan
        self.report = report
        self.deadline_s = deadline_s
        self.is_lost = False
        """Whether its thread was given up because the call passed its deadline."""
        self.has_ended = False
        self._unclaimed = [True]

    def claim(self) -> bool:
        """Whether the caller is the first to ask; what it does with the plan is its own."""
        try:
            return self._unclaimed.pop()  # one operation, so only one thread gets it
        except IndexError:
            return False


class StorageWorkers:
    """Carries out plans that read, write or ask a `StorageBackend`; owns the backend."""

    def __init__(
        self, backend: StorageBackend, slab: HostSlab, clock: Clock, *, num_threads: int = 2
    ) -> None:
        """`num_threads` for each kind of call."""
        self.backend = backend
        self.slab = slab
        self._clock = clock
        self._num_threads = num_threads
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
        """Begin as soon as threads are free; each task's `report` is told once, at its end."""
        for task in tasks:
            kind = _kind(task.plan)
            if self._num_alive[kind]:
                self._queues[kind].put(task)
            elif task.claim():
                # Queued tasks would only pile up: no thread will take them.
                task.report(
                    JobCompletion(task.plan.job, JobStatus.FAILED, reason="threads_lost")
                )

    def give_up(self, task: Task) -> None:
        """Stop counting on the thread that runs `task`: its call has passed its deadline. Another
        thread takes its place, unless MAX_LOST of this kind are lost already."""
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
        """Call another backend from now on; nothing may be in flight at the old one."""
        old, self.backend = self.backend, backend
        old.close()

    def stats(self) -> StorageStats:
        """The backend's statistics, with the threads lost here; never blocks."""
        stats = self.backend.stats()
        lost = sum(self._num_lost.values())
        return replace(stats, threads_lost=stats.threads_lost + lost) if lost else stats

    def close(self) -> None:
        """Let each thread end after what it is doing, and wait for none. Twice is safe."""
        for kind, queue in self._queues.items():
            for _ in range(self._num_alive[kind]):
                queue.put(None)
        self.backend.close()

    def run(self, task: Task) -> None:
        """Carry out a task that the caller has claimed, and report its end."""
        began, job = self._clock.now(), task.plan.job
        try:
            ended = self._call(task.plan, max(task.deadline_s - began, 0.001))
        except StorageTimeout as error:
            if error.quiet is not None and not error.quiet.is_set():
                # The backend gave up waiting, but its call may still touch the slots.
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
            del task  # it holds a plan, and the next one may be long in coming

    def _goes_on(self, task: Task, kind: str) -> bool:
        """Whether the thread that ran `task` takes another. One that was given up goes on only
        where no thread took its place."""
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
    """How many results, from the first on, are good."""
    return next((i for i, result in enumerate(results) if result not in good), len(results))
