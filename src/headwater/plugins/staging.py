"""Reads through staging memory, for engines that cannot wait for a lost call.

A read that has passed its deadline may still write to its buffer later. If the buffer belonged
to another engine, which reuses it at once, the late write would replace the bytes of another
block. So bytes are read into staging memory, verified there, and copied when they are complete.
A call that never returns keeps only its staging memory.
"""

from collections.abc import Sequence
from functools import partial
from threading import Event, Lock, Thread

from headwater.errors import StorageTimeout, StorageUnavailable
from headwater.storage import BlockRead, StorageBackend
from headwater.storage.calls import copy_bytes
from headwater.storage.forwarding import ForwardingStorage
from headwater.storage.io_threads import IoThreads
from headwater.transfer.slab import HostSlab
from headwater.types import BlockKey

_SHARE = 0.9
"""Share of the time limit for the read; the rest is for copying and reporting."""


class StagedStorage(ForwardingStorage):
    """A `StorageBackend` whose `read` touches its buffers only before it returns or raises."""

    def __init__(
        self, backend: StorageBackend, block_bytes: int, *, slice_blocks: int, num_slices: int
    ) -> None:
        """Staging memory for `num_slices` reads at once, of at most `slice_blocks` blocks each."""
        super().__init__(backend)
        self._slice_blocks = slice_blocks
        self._slab = HostSlab(slice_blocks * num_slices, block_bytes)
        self._free = list(range(num_slices))
        self._lock = Lock()
        self._threads = IoThreads("staged read", num_slices)

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        """Read at most `slice_blocks` blocks; the caller divides longer reads."""
        number = self._take()
        first = number * self._slice_blocks
        staged = self._slab.views(range(first, first + len(keys)))
        call = partial(self._read_whole, keys, staged, timeout_s * _SHARE)
        try:
            [outcomes] = self._threads.run([call], timeout_s=timeout_s * _SHARE)
        except StorageTimeout as error:
            self._give_back_later(number, error.quiet)
            raise StorageTimeout("a staged read did not end in time") from error
        except BaseException:
            self._give_back(number)
            raise
        for source, target, outcome in zip(staged, into, outcomes, strict=True):
            if outcome is BlockRead.READ:
                copy_bytes(target, source)
        self._give_back(number)
        return outcomes

    def close(self) -> None:
        self._threads.close()
        super().close()

    def _read_whole(
        self, keys: Sequence[BlockKey], staged: Sequence[memoryview], timeout_s: float
    ) -> list[BlockRead]:
        """Read, and return only when the staging memory is not used any more."""
        try:
            return self._backend.read(keys, staged, timeout_s=timeout_s)
        except StorageTimeout as error:
            if error.quiet is not None:
                error.quiet.wait()
            raise

    def _take(self) -> int:
        with self._lock:
            if not self._free:
                raise StorageUnavailable("every staging buffer is in a read that hangs")
            return self._free.pop()

    def _give_back(self, number: int) -> None:
        with self._lock:
            self._free.append(number)

    def _give_back_later(self, number: int, quiet: Event | None) -> None:
        """Free a buffer when the lost call that may still write to it has ended. Waits in a
        separate thread."""
        if quiet is None or quiet.is_set():
            self._give_back(number)
            return

        def wait() -> None:
            quiet.wait()
            self._give_back(number)

        Thread(target=wait, name="staged-read-lost", daemon=True).start()
