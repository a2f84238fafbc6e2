"""The receiving end of links whose blocks the receiver's device copies by itself.

The sender's memory is mapped here: its pool (`cuda`) or its staging buffers (`shm`). No byte passes
through buffers of the receiver.
"""

import logging
from collections import deque

from headwater.disagg.links.frame_validity import PeerFrameValidity
from headwater.disagg.links.frames import Frame
from headwater.disagg.links.interface import CopyInProgress, PeerBlocks
from headwater.disagg.links.leases import ArrivingBlocks
from headwater.disagg.peering.stream import WaitCheck
from headwater.disagg.protocol.errors import Malformed
from headwater.errors import DeviceError

log = logging.getLogger(__name__)


_MAX_STARTED = 4
_MAX_FAR_BYTES = 512 << 20
"""Maximum number of bytes of another device or of main memory that are being copied at the same
time: over the slowest bus they take as long as a fence may wait."""


class DeviceInbound:
    """Payloads in memory of the sender. Our device reads them and copies them into our slots in
    the background."""

    def __init__(self, peer: PeerBlocks, validity: PeerFrameValidity, max_bytes: int) -> None:
        self._peer = peer
        self._validity = validity
        self.max_bytes = max_bytes
        num_far = max(_MAX_FAR_BYTES // max_bytes, 2)
        self.max_started = _MAX_STARTED if peer.is_near else min(num_far, _MAX_STARTED)
        self._copies: deque[CopyInProgress | None] = deque()
        """The copy of each frame that was started and not finished; None if it copies nothing."""

    def receive(self, frame: Frame, arriving: ArrivingBlocks, check_wait: WaitCheck) -> int:
        pieces = frame.pieces
        if max([piece.slot for piece in pieces]) >= self._peer.num_slots:
            raise Malformed("block outside the sender's memory")
        copy = None
        if arriving.new and not arriving.stopped:
            sources = [pieces[at].slot for at in arriving.new]
            sizes = [pieces[at].num_bytes for at in arriving.new]
            try:
                copy = self._peer.start_copy(sources, arriving.slots(pieces), sizes)
            except DeviceError:
                log.exception("cannot start a copy from a peer's memory")
        self._copies.append(copy)
        return 0

    def finish(self, frame: Frame, arriving: ArrivingBlocks) -> None:
        copy = self._copies.popleft()
        if copy is None:
            return
        try:
            copy.wait()
        except DeviceError:
            log.exception("a copy from a peer's memory failed")
            return
        if self._validity.is_valid(frame):
            arriving.good.update(arriving.new)

    def num_following(self, frame: Frame) -> int:
        return 0

    def close(self) -> None:
        self._peer.close()
