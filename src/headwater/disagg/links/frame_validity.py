"""What a sender promises of the slots that a peer copies from: a word a frame, which both see.

    pledged ── the peer has copied, and finds the word as it was ──▶ the blocks have landed
       └────── withdrawn, and only then the slots are reused ──────▶ they have not

A sender that gives up does not wait for its peer, which may be in the middle of a block. It
takes its word back first; whoever still finds it after copying has copied what was pledged.
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
    """The sender's: one word for each frame that is under way."""

    def __init__(self, num_frames: int) -> None:
        self._pages = SharedPages(VALIDITY_BYTES)
        self.file = self._pages.file
        """For the peer, who can read them and no more."""

        self._words = np.frombuffer(self._pages.memory, _WORD)
        self._credits = FrameCredits(num_frames)

    def mark_valid(self, frame_number: int, check_wait: WaitCheck) -> int:
        """Pledge the slots of a frame; in which word. Waits until there is one free."""
        credit = self._credits.take(frame_number, check_wait)
        self._words[credit] = frame_number + 1
        return credit

    def invalidate(self, frame_number: int) -> None:
        """What a peer copies from now on does not count; nothing if it has answered."""
        with self._credits.held_by(frame_number) as credit:
            if credit is not None:
                self._words[credit] = 0

    def release(self, frame_number: int) -> None:
        """The peer has answered."""
        self._credits.release(frame_number)


class PeerFrameValidity:
    """The same, seen by the peer."""

    def __init__(self, memory: memoryview) -> None:
        self._words = np.frombuffer(memory, _WORD)

    def is_valid(self, frame: Frame) -> bool:
        """Whether everything that was copied for a frame until now was what its sender meant."""
        if frame.cell >= len(self._words):
            raise Malformed("a frame that no word could pledge")
        return int(self._words[frame.cell]) == frame.number + 1
