"""The threads that call a storage backend, so that nobody else ever waits for one.

A call blocks in the system or in C, without the interpreter's lock. The threads are daemons:
one that hangs in a dead backend keeps neither the loop nor the end of the process waiting.
"""

import logging
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread

from headwater.cache import Ending, Lookup, Promotion, Removal, Transfer
from headwater.clock import Clock
from headwater.errors import StorageError, StorageResting, StorageTimeout
from headwater.storage.base import BlockRead, BlockWrite, StorageBackend, StorageStats
from headwater.transfer.completions import Completion
from headwater.transfer.slab import HostSlab

log = logging.getLogger(__name__)

Plan = Transfer | Lookup | Removal
"""What may be started; a transfer between device and host is another's."""

Report = Callable[[Completion], None]
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
        self._queues: dict[str, SimpleQueue[list[Task] | None]] = {}
        for kind in _KINDS:
            queue = self._queues[kind] = SimpleQueue()
            for number in range(num_threads):
                name = f"storage-{kind}-{number}"
                Thread(target=self._work, args=(queue,), name=name, daemon=True).start()

    def start(self, tasks: Sequence[Task]) -> None:
        """Begin as soon as threads are free; each task's `report` is told once, at its end.

        Lookups that are started together are one call of the backend, and wake one thread.
        """
        lookups = [task for task in tasks if isinstance(task.plan, Lookup)]
        if lookups:
            self._queues["lookup"].put(lookups)
        for task in tasks:
            if not isinstance(task.plan, Lookup):
                self._queues[_kind(task.plan)].put([task])

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

    def run(self, tasks: Sequence[Task]) -> None:
        """Carry out tasks that the caller has claimed, lookups all or a single transfer, in one
        call; and report their ends."""
        began = self._clock.now()
        timeout_s = max(min(task.deadline_s for task in tasks) - began, 0.001)
        try:
            ends = self._call([task.plan for task in tasks], timeout_s)
        except StorageTimeout as error:
            if error.quiet is not None and not error.quiet.is_set():
                # The backend gave up waiting, but something of it may still touch the slots.
                for task in tasks:
                    task.report(Completion(task.plan.job, Ending.TIMED_OUT, reason="timeout"))
                error.quiet.wait()
            ends = _failed(tasks, "timeout")
        except StorageResting:  # said when it began
            ends = _failed(tasks, "breaker_open")
        except StorageError as error:
            log.warning("storage: %s", error)
            ends = _failed(tasks, "error")
        except Exception:
            log.exception("a storage thread caught what a backend should not raise")
            ends = _failed(tasks, "bug")
        busy_s = self._clock.now() - began
        for task, ended in zip(tasks, ends, strict=True):
            task.report(ended._replace(busy_s=busy_s / len(tasks)))

    def _work(self, queue: "SimpleQueue[list[Task] | None]") -> None:
        while (tasks := queue.get()) is not None:
            if claimed := [task for task in tasks if task.claim()]:
                self.run(claimed)

    def _call(self, plans: list[Plan], timeout_s: float) -> list[Completion]:
        lookups = [plan for plan in plans if isinstance(plan, Lookup)]
        if lookups:
            found = self.backend.contains([p.keys() for p in lookups], timeout_s=timeout_s)
            return [
                Completion(plan.job, Ending.DONE, count)
                for plan, count in zip(lookups, found, strict=True)
            ]
        (plan,) = plans
        if isinstance(plan, Removal):
            removed = self.backend.remove(None, timeout_s=timeout_s)
            return [Completion(plan.job, Ending.DONE, removed)]
        assert isinstance(plan, Transfer), "whatever is no question moves blocks"
        if isinstance(plan, Promotion):
            return [self._read(plan, timeout_s)]
        return [self._write(plan, timeout_s)]

    def _read(self, plan: Transfer, timeout_s: float) -> Completion:
        into = self.slab.views(plan.target_slots.tolist())
        results = self.backend.read(plan.keys, into, timeout_s=timeout_s)
        good = _leading(results, {BlockRead.READ})
        if good == plan.num_blocks:
            return Completion(plan.job, Ending.DONE, good)
        if results[good] is BlockRead.DAMAGED:
            return Completion(plan.job, Ending.DAMAGED, good, reason="damaged")
        return Completion(plan.job, Ending.ABSENT, good, reason="absent")

    def _write(self, plan: Transfer, timeout_s: float) -> Completion:
        blocks = self.slab.views(plan.source_slots.tolist())
        before = () if plan.parent is None else (plan.parent,)
        results = self.backend.write(
            plan.keys, blocks, parents=(*before, *plan.keys[:-1]), timeout_s=timeout_s
        )
        good = _leading(results, {BlockWrite.WRITTEN, BlockWrite.PRESENT})
        if good == plan.num_blocks:
            return Completion(plan.job, Ending.DONE, good)
        return Completion(plan.job, Ending.PARTIAL, good, reason="refused")


def _kind(plan: Plan) -> str:
    return "read" if isinstance(plan, Promotion) else "write"


def _failed(tasks: Sequence[Task], reason: str) -> list[Completion]:
    return [Completion(task.plan.job, Ending.FAILED, reason=reason) for task in tasks]


def _leading(results: list[BlockRead] | list[BlockWrite], good: set[object]) -> int:
    """How many results, from the first on, are good."""
    return next((i for i, result in enumerate(results) if result not in good), len(results))
