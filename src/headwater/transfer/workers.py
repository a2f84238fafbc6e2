"""The threads that call a storage backend, so that nobody else ever waits for one.

A call blocks in the system or in C, without the interpreter's lock. The threads are daemons:
one that hangs in a dead backend keeps neither the loop nor the end of the process waiting.
"""

import logging
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread

from headwater.cache import JobStatus, Lookup, Promotion, Removal, TransferJob
from headwater.clock import Clock
from headwater.errors import StorageError, StorageResting, StorageTimeout
from headwater.storage.base import BlockRead, BlockWrite, StorageBackend, StorageStats
from headwater.transfer.completions import JobCompletion
from headwater.transfer.slab import HostSlab

log = logging.getLogger(__name__)

Plan = TransferJob | Lookup | Removal
"""What may be started; a transfer between device and host is another's."""

Report = Callable[[JobCompletion], None]
"""Told of the end of a job, from any thread."""

_KINDS = ("lookup", "read", "write")
"""Kinds of calls have threads of their own: slow writes never delay a read."""


class Task:
    """A plan on its way to a thread. Begun by a thread or abandoned by the loop, never both."""

    def __init__(self, plan: Plan, report: Report, deadline_s: float) -> None:
        self.plan = plan
        self.report = report
        self.deadline_s = deadline_s
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
        for kind in _KINDS:
            queue = self._queues[kind] = SimpleQueue()
            for number in range(num_threads):
                name = f"storage-{kind}-{number}"
                Thread(target=self._work, args=(queue,), name=name, daemon=True).start()

    def start(self, tasks: Sequence[Task]) -> None:
        """Begin as soon as threads are free; each task's `report` is told once, at its end."""
        for task in tasks:
            self._queues[_kind(task.plan)].put(task)

    def replace(self, backend: StorageBackend) -> None:
        """Call another backend from now on; nothing may be in flight at the old one."""
        old, self.backend = self.backend, backend
        old.close()

    def stats(self) -> StorageStats:
        """What the backend says of itself; never blocks."""
        return self.backend.stats()

    def close(self) -> None:
        """Let each thread end after what it is doing, and wait for none. Twice is safe."""
        for queue in self._queues.values():
            for _ in range(self._num_threads):
                queue.put(None)
        self.backend.close()

    def run(self, task: Task) -> None:
        """Carry out a task that the caller has claimed, and report its end."""
        began, job = self._clock.now(), task.plan.job
        try:
            ended = self._call(task.plan, max(task.deadline_s - began, 0.001))
        except StorageTimeout as error:
            if error.quiet is not None and not error.quiet.is_set():
                # The backend gave up waiting, but something of it may still touch the slots.
                task.report(JobCompletion(job, JobStatus.TIMED_OUT, reason="timeout"))
                error.quiet.wait()
            ended = JobCompletion(job, JobStatus.FAILED, reason="timeout")
        except StorageResting:  # said when it began
            ended = JobCompletion(job, JobStatus.FAILED, reason="breaker_open")
        except StorageError as error:
            log.warning("storage: %s", error)
            ended = JobCompletion(job, JobStatus.FAILED, reason="error")
        except Exception:
            log.exception("a storage thread caught what a backend should not raise")
            ended = JobCompletion(job, JobStatus.FAILED, reason="bug")
        task.report(ended._replace(busy_s=self._clock.now() - began))

    def _work(self, queue: "SimpleQueue[Task | None]") -> None:
        while (task := queue.get()) is not None:
            if task.claim():
                self.run(task)

    def _call(self, plan: Plan, timeout_s: float) -> JobCompletion:
        if isinstance(plan, Lookup):
            found = self.backend.contains(plan.runs(), timeout_s=timeout_s)
            answers = tuple(n for _, n in zip(plan.questions, found, strict=True))
            return JobCompletion(plan.job, JobStatus.DONE, found=answers)
        if isinstance(plan, Removal):
            removed = self.backend.remove(None, timeout_s=timeout_s)
            return JobCompletion(plan.job, JobStatus.DONE, removed)
        if isinstance(plan, Promotion):
            return self._read(plan, timeout_s)
        return self._write(plan, timeout_s)

    def _read(self, plan: TransferJob, timeout_s: float) -> JobCompletion:
        into = self.slab.views(plan.target_slots.tolist())
        results = self.backend.read(plan.keys, into, timeout_s=timeout_s)
        good = _leading(results, {BlockRead.READ})
        if good == plan.num_blocks:
            return JobCompletion(plan.job, JobStatus.DONE, good)
        if results[good] is BlockRead.DAMAGED:
            return JobCompletion(plan.job, JobStatus.DAMAGED, good, reason="damaged")
        return JobCompletion(plan.job, JobStatus.ABSENT, good, reason="absent")

    def _write(self, plan: TransferJob, timeout_s: float) -> JobCompletion:
        blocks = self.slab.views(plan.source_slots.tolist())
        before = () if plan.parent is None else (plan.parent,)
        results = self.backend.write(
            plan.keys, blocks, parents=(*before, *plan.keys[:-1]), timeout_s=timeout_s
        )
        good = _leading(results, {BlockWrite.WRITTEN, BlockWrite.PRESENT})
        if good == plan.num_blocks:
            return JobCompletion(plan.job, JobStatus.DONE, good)
        return JobCompletion(plan.job, JobStatus.PARTIAL, good, reason="refused")


def _kind(plan: Plan) -> str:
    if isinstance(plan, Lookup):
        return "lookup"
    return "read" if isinstance(plan, Promotion) else "write"


def _leading(results: list[BlockRead] | list[BlockWrite], good: set[object]) -> int:
    """How many results, from the first on, are good."""
    return next((i for i, result in enumerate(results) if result not in good), len(results))
