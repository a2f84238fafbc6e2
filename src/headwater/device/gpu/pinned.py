"""Pins the host slab in the background, so that serving begins before all of it is pinned.

Pinning 64 GiB takes 15 seconds. Threads pin the slab piece by piece. A copy waits in its own
thread for the pieces it touches, and these are pinned next.

Pinning holds a driver lock that launching a kernel needs too. So pieces are small, all threads
pre-fault pages without the lock, and one thread at a time calls the driver and pauses after
each piece.
"""

import ctypes
import logging
from collections.abc import Iterable
from threading import Condition, Event, Lock, Thread

import numpy as np

from headwater.device.gpu.runtime import Runtime
from headwater.errors import DeviceError
from headwater.transfer.slab import HostSlab
from headwater.types import Slots

log = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20
_NUM_THREADS = 8
_REST_S = 0.003

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later; where it is refused, pinning makes the pages."""


class PinnedSlab:
    """The slab's memory, known to the device sooner or later."""

    def __init__(self, slab: HostSlab, runtime: Runtime) -> None:
        self._slab = slab  # pinned memory must not go before it is unpinned
        self.base = int(np.frombuffer(slab.memory, dtype=np.uint8).ctypes.data)
        self.slot_bytes = slab.slot_bytes
        self._runtime = runtime
        self._size = slab.num_slots * slab.slot_bytes
        # Whole slots: no block is in two pieces.
        self._piece_slots = max(_PIECE_BYTES // slab.slot_bytes, 1)
        self._num_pieces = -(-slab.num_slots // self._piece_slots)
        self._changed = Condition()
        self._waiting = list(range(self._num_pieces - 1, -1, -1))
        """Not begun; the next is the last."""
        self._pinned: set[int] = set()
        self._failed: str | None = None
        self._num_busy = 0
        self._driver = Lock()
        self._closing = Event()
        for number in range(min(_NUM_THREADS, self._num_pieces)):
            Thread(target=self._work, name=f"pin-{number}", daemon=True).start()

    @property
    def share(self) -> float:
        """How much is pinned, from 0 to 1."""
        return len(self._pinned) / max(self._num_pieces, 1)

    def pieces_of(self, slots: Slots) -> Slots:
        """The piece each slot is in: one copy may touch one piece only."""
        return slots // self._piece_slots

    def await_slots(self, slots: Slots) -> None:
        """Wait until these slots are pinned; they are next. DeviceError if they never will be."""
        wanted = set(np.unique(self.pieces_of(slots)).tolist())
        with self._changed:
            if not wanted <= self._pinned:
                self._hurry(wanted)
            while not wanted <= self._pinned and self._failed is None:
                self._changed.wait()
            if self._failed is not None:
                raise DeviceError(self._failed)

    def close(self) -> None:
        """Wait for the threads, then unpin. Safe to call twice."""
        self._closing.set()
        with self._changed:
            self._waiting.clear()
            while self._num_busy:
                self._changed.wait()
            pinned, self._pinned = self._pinned, set()
            self._failed = self._failed or "the slab is closed"
        for piece in pinned:
            self._runtime.unpin(self.base + self._start(piece))

    def _hurry(self, wanted: Iterable[int]) -> None:
        first = [piece for piece in self._waiting if piece in set(wanted)]
        rest = [piece for piece in self._waiting if piece not in set(wanted)]
        self._waiting = rest + first

    def _work(self) -> None:
        self._runtime.enter_thread()
        while True:
            with self._changed:
                if not self._waiting:
                    return
                piece = self._waiting.pop()
                self._num_busy += 1
            self._pin(piece)

    def _pin(self, piece: int) -> None:
        start, failed = self._start(piece), None
        size = min(self._piece_slots * self.slot_bytes, self._size - start)
        _make_pages(self.base + start, size)
        try:
            with self._driver:
                self._runtime.pin(self.base + start, size)
                self._closing.wait(_REST_S)
        except DeviceError as error:
            log.exception("the host tier's memory cannot be pinned")
            failed = str(error)
        with self._changed:
            self._num_busy -= 1
            if failed is None:
                self._pinned.add(piece)
            self._failed = self._failed or failed
            self._changed.notify_all()

    def _start(self, piece: int) -> int:
        return piece * self._piece_slots * self.slot_bytes


def _make_pages(address: int, num_bytes: int) -> None:
    """Have the system give the pages of this memory; what is written there stays."""
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE)
