"""Leases of a receiver: which bytes may be written to which slots, and until when.

    open ── begin_write … end_write ──▶ fenced ── the last write ends ──▶ closed

A write is the blocks of one frame on their way into slots. A lease is not closed while a write
is in progress. A write checks `stopped` at least once per tick and ends when it is true. A
block that has been received is never written again.
"""

from collections.abc import Sequence
from threading import Lock
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwater.disagg.links.frames import SentPiece
from headwater.disagg.links.interface import BlockMemory, Deliver
from headwater.disagg.protocol.errors import LinkBroken
from headwater.disagg.protocol.push import BlockReceived, LeaseClosed, PushFailure
from headwater.errors import InvariantError
from headwater.storage.codec import checksum

Bytes: TypeAlias = NDArray[np.uint8]


class _Lease:
    """State of one lease."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = list(slots)
        self.received: dict[int, int] = {}
        self.arriving: set[int] = set()
        self.num_writing = 0
        self.fenced = False


class ArrivingBlocks:
    """Blocks of one frame while they are written to their slots."""

    def __init__(
        self, number: int, lease: _Lease, views: list[memoryview | None], new: list[int]
    ) -> None:
        self.lease_number = number
        self.views = views
        """The target of each piece; None for a block that was received before."""

        self.new = new
        """Pieces that have a target, in order."""

        self.good: set[int] = set()
        """Pieces that are complete and verified."""

        self.lease = lease

    @property
    def stopped(self) -> bool:
        """Whether the lease was fenced: not one more byte may be written."""
        return self.lease.fenced

    def slots(self, pieces: Sequence[SentPiece]) -> list[int]:
        """The target slot of each new piece of the frame, for a copy that does not use views."""
        slots = self.lease.slots
        return [slots[pieces[at].block] for at in self.new]

    def copy(self, at: int, source: Bytes) -> None:
        """Copy `source` to the target of piece `at`, which must have one."""
        view = self.views[at]
        assert view is not None
        np.copyto(np.frombuffer(view, dtype=np.uint8), source)

    def verify(self, at: int, expected: bytes) -> None:
        """Piece `at` is complete: compare its checksum."""
        view = self.views[at]
        if view is not None and checksum(view) == expected:
            self.good.add(at)


class LeaseBook:
    """All leases of a receiver. Its owner calls `open` and `fence`; connections call the rest."""

    def __init__(self, memory: BlockMemory, deliver: Deliver) -> None:
        self.block_bytes = memory.block_bytes
        self._memory = memory
        self._deliver = deliver
        self._lock = Lock()
        self._leases: dict[int, _Lease] = {}

    def open(self, number: int, slots: Sequence[int]) -> None:
        """Let blocks of this lease be written."""
        with self._lock:
            if number in self._leases:
                raise InvariantError(f"lease {number} is open already")
            self._leases[number] = _Lease(slots)

    def fence(self, number: int) -> None:
        """Let nothing more be written. LeaseClosed is delivered now, or by the last write in
        progress."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.fenced:
                return
            lease.fenced = True
            closed = self._close_if_done(number, lease)
        if closed is not None:
            self._deliver(closed)

    def fence_all(self) -> None:
        """Fence every open lease."""
        with self._lock:
            numbers = list(self._leases)
        for number in numbers:
            self.fence(number)

    def begin_write(
        self, number: int, pieces: Sequence[SentPiece]
    ) -> ArrivingBlocks | PushFailure:
        """Begin to write the blocks of a frame; `end_write` must follow. Returns the reason if
        the frame is refused."""
        indices = [piece.block for piece in pieces]
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.fenced:
                return PushFailure.FENCED
            if max(indices) >= len(lease.slots):
                return PushFailure.OUTSIDE
            if len(set(indices)) < len(indices) or not lease.arriving.isdisjoint(indices):
                return PushFailure.TWICE
            new = [at for at, index in enumerate(indices) if index not in lease.received]
            lease.arriving.update(indices[at] for at in new)
            lease.num_writing += 1
        # Outside the lock, because a view of staging memory may wait for a free buffer. The
        # lease stays open meanwhile: `num_writing` counts this write.
        views: list[memoryview | None] = [None] * len(pieces)
        arriving = ArrivingBlocks(number, lease, views, new)
        try:
            for at in new:
                slot = lease.slots[indices[at]]
                views[at] = self._memory.view(slot)[: pieces[at].num_bytes]
        except Exception as error:
            self.end_write(arriving, pieces)
            if arriving.stopped and isinstance(error, LinkBroken):
                return PushFailure.FENCED
            raise
        return arriving

    def end_write(self, arriving: ArrivingBlocks, pieces: Sequence[SentPiece]) -> None:
        """End a write, and report the blocks in `arriving.good` as received."""
        lease, number = arriving.lease, arriving.lease_number
        good = [pieces[at] for at in arriving.new if at in arriving.good]
        with self._lock:
            lease.arriving.difference_update([pieces[at].block for at in arriving.new])
            lease.received.update([(piece.block, piece.num_bytes) for piece in good])
        # Reported before the write stops counting, because LeaseClosed must be the last event.
        for piece in good:
            self._deliver(BlockReceived(number, piece.block, piece.num_bytes))
        with self._lock:
            lease.num_writing -= 1
            closed = self._close_if_done(number, lease)
        if closed is not None:
            self._deliver(closed)

    def _close_if_done(self, number: int, lease: _Lease) -> LeaseClosed | None:
        """The final event of a lease, if it is fenced and no write is in progress."""
        if not lease.fenced or lease.num_writing:
            return None
        del self._leases[number]
        return LeaseClosed(number, sum(lease.received.values()), frozenset(lease.received))
