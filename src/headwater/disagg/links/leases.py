"""Which bytes may land where: the leases of a receiver, and the fence that ends each.

    open ── land … settle ──▶ fenced ── the last landing settles ──▶ quiet

A landing is one frame's blocks on their way into slots. While one is under way its lease is not
quiet; it looks at `stopped` at least once a tick and then writes no more. A block that landed
is never written again.
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
    """What is known of one lease."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = list(slots)
        self.received: dict[int, int] = {}
        self.arriving: set[int] = set()
        self.num_writing = 0
        self.fenced = False


class ArrivingBlocks:
    """Blocks of one lease that are arriving."""

    def __init__(
        self, number: int, lease: _Lease, views: list[memoryview | None], new: list[int]
    ) -> None:
        self.lease_number = number
        self.views = views
        """Where each piece goes; None for a block that is there already."""

        self.new = new
        """Which pieces have a view, in order."""

        self.good: set[int] = set()
        """Which of those are in their slots, and are what was sent."""

        self.lease = lease

    @property
    def stopped(self) -> bool:
        """Whether the lease has been fenced: not one more byte may be written."""
        return self.lease.fenced

    def copy(self, at: int, source: Bytes) -> None:
        """Fill the view of piece `at`, which has one."""
        view = self.views[at]
        assert view is not None
        np.copyto(np.frombuffer(view, dtype=np.uint8), source)

    def verify(self, at: int, expected: bytes) -> None:
        """All bytes of piece `at` have arrived: see whether they are those that were sent."""
        view = self.views[at]
        if view is not None and checksum(view) == expected:
            self.good.add(at)


class LeaseBook:
    """Every lease of a receiver. `open` and `fence` by its owner, the rest by connections."""

    def __init__(self, memory: BlockMemory, deliver: Deliver) -> None:
        self.block_bytes = memory.block_bytes
        self._memory = memory
        self._deliver = deliver
        self._lock = Lock()
        self._leases: dict[int, _Lease] = {}

    def open(self, number: int, slots: Sequence[int]) -> None:
        """Let blocks of this lease land."""
        with self._lock:
            if number in self._leases:
                raise InvariantError(f"lease {number} is open already")
            self._leases[number] = _Lease(slots)

    def fence(self, number: int) -> None:
        """Let nothing more land; Quiet now, or by the last landing that is under way."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.fenced:
                return
            lease.fenced = True
            closed = self._close_if_done(number, lease)
        if closed is not None:
            self._deliver(closed)

    def fence_all(self) -> None:
        """Fence every lease there is."""
        with self._lock:
            numbers = list(self._leases)
        for number in numbers:
            self.fence(number)

    def begin_write(
        self, number: int, pieces: Sequence[SentPiece]
    ) -> ArrivingBlocks | PushFailure:
        """Begin to land; `end_write` has to follow. Or why not one byte of it may."""
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
        """A landing writes no more, and its `good` blocks have landed."""
        lease, number = arriving.lease, arriving.lease_number
        events = []
        with self._lock:
            for at in arriving.new:
                piece = pieces[at]
                lease.arriving.discard(piece.block)
                if at in arriving.good:
                    lease.received[piece.block] = piece.num_bytes
                    events.append(BlockReceived(number, piece.block, piece.num_bytes))
        for event in events:
            self._deliver(event)
        with self._lock:
            lease.num_writing -= 1
            closed = self._close_if_done(number, lease)
        if closed is not None:
            self._deliver(closed)

    def _close_if_done(self, number: int, lease: _Lease) -> LeaseClosed | None:
        """The last word on a lease, if it is time for it."""
        if not lease.fenced or lease.num_writing:
            return None
        del self._leases[number]
        return LeaseClosed(number, sum(lease.received.values()), frozenset(lease.received))
