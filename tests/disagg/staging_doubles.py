"""For tests of staged links: a device that is an array, and its copier."""

from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from headwater.cache import JobStatus, LoadJob
from headwater.disagg.links.staging.buffers import Buffers
from headwater.disagg.links.staging.registry import StagedLinks
from headwater.testing.links import BlockArray
from headwater.transfer.completions import JobCompletion
from headwater.transfer.slab import HostSlab
from tests.disagg.wire import CONFIG, MakeLinks, engine


class ArrayCopier:
    """A `DeviceCopier` whose device is a `BlockArray`: one thread, which can be blocked."""

    def __init__(self, array: BlockArray, slab: HostSlab) -> None:
        self._array = array
        self._slab = slab
        self.gate = Event()
        self.gate.set()
        self.fails = False
        self.refuses = False
        self.is_closed = False
        self.num_started = 0
        self._queue: SimpleQueue[Any] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    def start(self, transfer, report) -> None:
        if self.refuses:
            raise RuntimeError("the device is in no state to copy")
        self.num_started += 1
        self._queue.put((transfer, report))

    def close(self) -> None:
        self.is_closed = True
        self.gate.set()
        self._queue.put(None)

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            transfer, report = entry
            self.gate.wait(30.0)
            pairs = zip(transfer.source_slots, transfer.target_slots, strict=True)
            for source, target in pairs:
                self._copy(int(source), int(target), up=isinstance(transfer, LoadJob))
            ending = JobStatus.FAILED if self.fails else JobStatus.DONE
            report(JobCompletion(transfer.job, ending, transfer.num_blocks))

    def _copy(self, source: int, target: int, *, up: bool) -> None:
        if self.fails:
            return
        if up:
            self._array.view(target)[:] = self._slab.view(source)
        else:
            self._slab.view(target)[:] = self._array.view(source)


class SomeBuffers(Buffers):
    """A few buffers, an array as device, and their copier."""

    def __init__(self, array: BlockArray, num_buffers: int) -> None:
        slab = HostSlab(num_buffers, array.block_bytes)
        self.copier = ArrayCopier(array, slab)
        self._waiting = Event()
        super().__init__(slab, self.copier)

    def await_one(self, timeout_s, is_over) -> int | None:
        if not self._free:
            self._waiting.set()
        return super().await_one(timeout_s, is_over)

    def await_waiting(self) -> None:
        """Wait until a thread waits for a buffer."""
        assert self._waiting.wait(10.0)

    @property
    def all_free(self) -> bool:
        return sorted(self._free) == list(range(self._slab.num_slots))


class MakeStaged(MakeLinks):
    """Links of instances with a device; with `ends`, the other ends have blocks in main memory."""

    def __init__(self, link: str, ends: tuple[str, ...] = ("receiver", "sender")) -> None:
        super().__init__(link)
        self._staged = ends

    def __call__(self, memory, deliver):
        if self._end not in self._staged:
            return super().__call__(memory, deliver)
        end, self._end = self._end, "sender"
        given = engine(end) if self._link == "mooncake" else None
        return StagedLinks(
            CONFIG,
            memory.block_bytes,
            lambda slab: ArrayCopier(memory, slab),
            deliver,
            engine=given,
        )
