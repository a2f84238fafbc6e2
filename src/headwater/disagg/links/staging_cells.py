"""Staging memory between two peers: the sender fills cells, the receiver copies them to slots.

A cell holds the payload of one frame, block after block. It is free again when the receiver has
answered the frame. The receiver copies a cell into slots only if the lease allows it, and verifies
the bytes *in the slots*. So a write into a cell that comes late or twice can make a push fail, and
can never damage a block that was received.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition

import numpy as np

from headwater.disagg.links.frames import Frame, SentPiece, describe
from headwater.disagg.links.leases import ArrivingBlocks
from headwater.disagg.peering.stream import TICK_S, WaitCheck
from headwater.disagg.protocol.errors import Malformed
from headwater.disagg.protocol.push import BlockPiece
from headwater.storage.calls import address_of


class FrameCredits:
    """Limits the frames in flight: each frame holds a credit until it is answered."""

    def __init__(self, num_credits: int) -> None:
        self._changed = Condition()
        self._free = list(range(num_credits))
        self._taken: dict[int, int] = {}

    def take(self, frame_number: int, check_wait: WaitCheck) -> int:
        """A credit for one frame; waits until one is free."""
        with self._changed:
            while not self._free:
                self._changed.wait(TICK_S)
                if not self._free:
                    check_wait()
            credit = self._taken[frame_number] = self._free.pop()
            return credit

    @contextmanager
    def held_by(self, frame_number: int) -> Iterator[int | None]:
        """The credit of a frame, which cannot be released inside the `with` statement; None if
        the frame has no credit."""
        with self._changed:
            yield self._taken.get(frame_number)

    def release(self, frame_number: int) -> None:
        """Free the credit of a frame. Malformed if it has none."""
        with self._changed:
            credit = self._taken.pop(frame_number, None)
            if credit is None:
                raise Malformed("answer to a frame that was not sent")
            self._free.append(credit)
            self._changed.notify()


class StagingCells(FrameCredits):
    """Cells of equal size in one buffer, with a credit for each."""

    def __init__(self, memory: memoryview, cell_bytes: int) -> None:
        self.cell_bytes = cell_bytes
        self.num_cells = len(memory) // cell_bytes
        super().__init__(self.num_cells)
        self.address = address_of(memory)
        self._memory = np.frombuffer(memory, dtype=np.uint8)

    def gather(
        self, cell: int, pieces: Sequence[BlockPiece], views: Sequence[memoryview]
    ) -> tuple[SentPiece, ...]:
        """Copy blocks into a cell, one after the other; returns their pieces."""
        at = cell * self.cell_bytes
        sent = []
        for piece, view in zip(pieces, views, strict=True):
            sent.append(describe(piece, view))
            # Computing the checksum has brought the block into the CPU cache: copy it now.
            np.copyto(self._memory[at : at + len(view)], np.frombuffer(view, dtype=np.uint8))
            at += len(view)
        return tuple(sent)


class CellInbound:
    """Copies payloads from cells into slots. It is the only writer of those slots."""

    def __init__(self, memory: memoryview, cell_bytes: int) -> None:
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self.max_bytes = cell_bytes
        self._num_cells = len(memory) // cell_bytes

    def receive(self, frame: Frame, arriving: ArrivingBlocks, check_wait: WaitCheck) -> int:
        if frame.cell >= self._num_cells:
            raise Malformed(f"frame with staging cell {frame.cell}, which does not exist")
        at = frame.cell * self.max_bytes
        for credit, piece in enumerate(frame.pieces):
            if arriving.stopped:
                break
            if arriving.views[credit] is not None:
                arriving.copy(credit, self._memory[at : at + piece.num_bytes])
                arriving.verify(credit, piece.checksum)
            # Also for a block that was received before: its bytes are in the cell, too.
            at += piece.num_bytes
        return 0

    def num_following(self, frame: Frame) -> int:
        return 0

    def close(self) -> None:
        """Nothing to do: the memory belongs to the link."""
