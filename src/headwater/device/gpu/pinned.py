"""Pins the host slab piece by piece in threads, while the model is being prepared.

Pinning holds a driver lock that kernel launches also need, so requests at the same time would
be slow. The engine therefore waits before it is ready, for a bounded time (`await_all`). The
remaining pieces are pinned in the background with pauses, one at a time. A copy waits in its
own thread for the pieces it touches, and these are pinned next.

All threads pre-fault pages without the lock; one thread at a time calls the driver.
"""

import logging
from collections.abc import Iterable
from threading import Condition, Event, Lock, Thread

import numpy as np

from headwater.clock import Clock, SystemClock
from headwater.device.gpu.runtime import Runtime
from headwater.errors import DeviceError
from headwater.transfer.pages import make_pages
from headwater.transfer.slab import HostSlab
from headwater.types import Slots

log = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20
_NUM_THREADS = 8
_REST_FACTOR = 4.0
"""After pinning a piece in the background, the thread pauses for this many times as long as the
piece took."""


class PinnedSlab:
    """The memory of the slab, which becomes pinned over time."""

    def __init__(self, slab: HostSlab, runtime: Runtime, clock: Clock | None = None) -> None:
        self._slab = slab  # pinned memory must not be freed before it is unpinned
        self.base = int(np.frombuffer(slab.memory, dtype=np.uint8).ctypes.data)
        self.slot_bytes = slab.slot_bytes
        self._runtime = runtime
        self._clock = clock or SystemClock()
        self._size = slab.num_slots * slab.slot_bytes
        # Pieces of whole slots, so that no block is in two pieces.
        self._piece_slots = max(_PIECE_BYTES // slab.slot_bytes, 1)
        self._num_pieces = -(-slab.num_slots // self._piece_slots)
        self._changed = Condition()
        self._waiting = list(range(self._num_pieces - 1, -1, -1))
        """Pieces that have not begun; the one at the end of the list is pinned next."""
        self._pinned: set[int] = set()
        self._failed: str | None = None
        self._num_busy = 0
        self._driver = Lock()
        self._is_gentle = False
        """Whether requests are being served."""
        self._closing = Event()
        for number in range(min(_NUM_THREADS, self._num_pieces)):
            Thread(target=self._work, name=f"pin-{number}", daemon=True).start()

    @property
    def share(self) -> float:
        """The pinned share, from 0 to 1."""
        return len(self._pinned) / max(self._num_pieces, 1)

    def pieces_of(self, slots: Slots) -> Slots:
        """The piece of each slot; one copy may touch only one piece."""
        return slots // self._piece_slots

    def await_slots(self, slots: Slots) -> None:
        """Wait until these slots are pinned; their pieces come next. Raises DeviceError if they
        never will be."""
        wanted = set(np.unique(self.pieces_of(slots)).tolist())
        with self._changed:
            if not wanted <= self._pinned:
                self._hurry(wanted)
            while not wanted <= self._pinned and self._failed is None:
                self._changed.wait()
            if self._failed is not None:
                raise DeviceError(self._failed)

    def await_all(self, within_s: float) -> bool:
        """Wait until everything is pinned, at most `within_s`; return whether it is. From then
        on threads pause between pieces."""
        with self._changed:
            is_done = self._changed.wait_for(self._has_ended, within_s)
        self._is_gentle = True
        return is_done

    def _has_ended(self) -> bool:
        return len(self._pinned) == self._num_pieces or self._failed is not None

    def close(self) -> None:
        """Wait for the threads, then unpin. Calling it twice is safe."""
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
        make_pages(self.base + start, size)  # if this is refused, pinning allocates them
        try:
            with self._driver:
                began_s = self._clock.now()
                self._runtime.pin(self.base + start, size)
                if self._is_gentle:
                    self._closing.wait(_REST_FACTOR * (self._clock.now() - began_s))
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
