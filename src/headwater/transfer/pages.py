"""Allocates the pages of the host tier before blocks are written to them.

The system clears a page when it is first written. On a virtual machine the hypervisor may have to
find the memory first, so a copy to new pages takes up to 30 times as long as one to pages that
exist. While the tier fills for the first time, requests would pay for that.
"""

import ctypes
import logging
from threading import Event, Thread

import numpy as np

from headwater.clock import Clock

log = logging.getLogger(__name__)

_PIECE_BYTES = 2 << 20
"""One huge page. A call holds a lock of the process's memory, for which other threads that map or
unmap memory wait."""

_REST_FACTOR = 1.0
"""After a piece the thread pauses for this many times as long as the piece took."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later."""


def make_pages(address: int, num_bytes: int) -> bool:
    """Let the system allocate the pages of this memory, without the interpreter lock; its content
    stays. Returns whether it did."""
    libc = ctypes.CDLL(None)
    size = ctypes.c_size_t(num_bytes)
    return not libc.madvise(ctypes.c_void_p(address), size, _POPULATE_WRITE)


class PageMaker:
    """A thread that allocates the pages of `memory` from its beginning, with pauses."""

    def __init__(self, memory: memoryview, clock: Clock) -> None:
        self._bytes = np.frombuffer(memory, dtype=np.uint8)  # keeps the memory mapped
        self._clock = clock
        self._closing = Event()
        self._thread = Thread(target=self._work, name="host-pages", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended; return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread after its current piece. Calling it twice is safe."""
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        address, size = int(self._bytes.ctypes.data), len(self._bytes)
        for start in range(0, size, _PIECE_BYTES):
            began_s = self._clock.now()
            if not make_pages(address + start, min(_PIECE_BYTES, size - start)):
                log.info("pages of the host tier are allocated when they are first written")
                return
            if self._closing.wait(_REST_FACTOR * (self._clock.now() - began_s)):
                return
