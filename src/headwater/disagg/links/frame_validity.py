"""One word of shared memory for each frame: is the sender's memory still what the frame describes?

    valid ── the peer has copied, and the word is unchanged ──▶ the blocks were received
       └──── the sender clears the word, then reuses slots ───▶ the blocks are discarded

A sender that gives up a push (deadline, close) must not wait for a peer that may be in the middle
of a copy. It clears the word first and reuses the slots afterwards. A peer reads the word after
it has copied. If the word is unchanged then, the slots were not reused while it copied. If it is
cleared, the copy may contain other data and does not count.
"""

import numpy as np

from headwater.disagg.links.frames import Frame
from headwater.disagg.links.staging_cells import FrameCredits
from headwater.disagg.peering.stream import WaitCheck
from headwater.disagg.protocol.errors import Malformed
from headwater.transfer.shared import SharedPages

VALIDITY_BYTES = 4096
_WORD = np.dtype("<u8")


class FrameValidity:
    """The sender's words, one for each frame in flight."""

    def __init__(self, num_frames: int) -> None:
        self._pages = SharedPages(VALIDITY_BYTES)
        self.file = self._pages.file
        """Descriptor for the peer, which can map the words read-only."""

        self._words = np.frombuffer(self._pages.memory, _WORD)
        self._credits = FrameCredits(num_frames)

    def mark_valid(self, frame_number: int, check_wait: WaitCheck) -> int:
        """Declare the slots of a frame valid; returns the index of its word. Waits for a free
        word."""
        credit = self._credits.take(frame_number, check_wait)
        # The number of the frame and not a flag: if the word is used for another frame before the
        # peer reads it, the peer's copy of this frame must not count. One more than the number,
        # because 0 means invalid.
        self._words[credit] = frame_number + 1
        return credit

    def invalidate(self, frame_number: int) -> None:
        """From now on, copies of this frame do not count. Does nothing if the peer has
        answered."""
        # Under the lock of the credits. Otherwise the answer could free the word in between,
        # and this would clear the word of another frame.
        with self._credits.held_by(frame_number) as credit:
            if credit is not None:
                self._words[credit] = 0

    def release(self, frame_number: int) -> None:
        """The peer has answered: the word is free for another frame."""
        self._credits.release(frame_number)


class PeerFrameValidity:
    """The peer's read-only view of the words."""

    def __init__(self, memory: memoryview) -> None:
        self._words = np.frombuffer(memory, _WORD)

    def is_valid(self, frame: Frame) -> bool:
        """Whether the slots of a frame were unchanged until now; called after the copy."""
        if frame.cell >= len(self._words):
            raise Malformed(f"frame with validity word {frame.cell}, which does not exist")
        return int(self._words[frame.cell]) == frame.number + 1
