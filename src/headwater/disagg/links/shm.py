"""The `shm` link, for peers on one machine: the receiver copies from where the blocks lie.

    sender's slots ── a mapping of the same memory ──▶ one copy ──▶ receiver's slots

A sender hands over a descriptor of its whole block memory, on a Unix socket, once both have
proved the token. It is a sealed memfd: it has no name, so nothing is left behind when a process
dies; no peer can pull it away under a copy, nor write to it. A frame says in which slots of the
sender its blocks are; those stay as they are until it is answered, or the sender has withdrawn
what it pledged. So nobody computes a checksum: there is no wire that could turn a bit over.
"""

import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headwater.disagg.link import BlockMemory, BlockPiece, OneMemory, PushFailure
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.frames import (
    Frame,
    Malformed,
    announce,
    encode_frame,
    make_frame,
)
from headwater.disagg.links.hello import Greeting, LinkSession, Welcome, greet
from headwater.disagg.links.landing import ArrivingBlocks
from headwater.disagg.links.pledges import PLEDGES_BYTES, FrameValidity, PeerFrameValidity
from headwater.disagg.links.stream import LinkBroken, Patience, Stream
from headwater.errors import ConfigError
from headwater.transfer.shared import map_shared

_OFFER = struct.Struct("<Q")
"""Bytes of the memory that is handed over with it."""

_NUM_FILES = 2
_CREDENTIALS = struct.Struct("3i")
_NUM_FRAMES = 4
"""Under way at once: the next one is there before the peer has copied the last."""

_SHARED_BYTES = 4 << 20
"""From here on two threads share the copying of a frame: each takes the next block."""

FRAME_BYTES = 32 << 20
"""Only its table travels, so a frame is as large as makes its own costs small."""


class ShmAcceptor:
    """Listens on a Unix socket without a file: its name goes with the process."""

    link = "shm"

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        name = f"headwater-{secrets.token_hex(8)}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"\0{name}")
        self.listener.listen(64)
        self.address = f"shm://{name}"

    def admit(
        self, welcome: Welcome, stream: Stream, patience: Patience
    ) -> tuple[LinkSession, "ShmInbound"]:
        _check_user(stream)
        session = welcome.accept()
        memory, pledges = _take_memory(stream, patience)
        return session, ShmInbound(memory, pledges, self._block_bytes)

    def close(self) -> None:
        """There is nothing but the listener."""


class ShmInbound:
    """Payloads in the slots of the sender; copies them into ours, whose only writer it is."""

    def __init__(
        self, memory: memoryview, pledges: PeerFrameValidity, block_bytes: int
    ) -> None:
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._pledges = pledges
        self._block_bytes = block_bytes
        self._num_slots = len(memory) // block_bytes
        self.max_bytes = max(FRAME_BYTES, block_bytes)
        self._helper = ThreadPoolExecutor(1, "shm-copy")

    def receive(self, frame: Frame, landing: ArrivingBlocks, patience: Patience) -> int:
        if max(piece.slot for piece in frame.pieces) >= self._num_slots:
            raise Malformed("a block that is outside the sender's memory")
        places, copied = iter(landing.new), set[int]()
        if frame.payload_bytes < _SHARED_BYTES:
            self._copy(frame, landing, places, copied)
        else:
            helping = self._helper.submit(self._copy, frame, landing, places, copied)
            try:
                self._copy(frame, landing, places, copied)
            finally:  # whatever happened here, nothing is written once this returns
                if not helping.cancel():
                    helping.result()
        if self._pledges.holds(frame):
            landing.good.update(copied)
        return 0

    def _copy(
        self, frame: Frame, landing: ArrivingBlocks, places: Iterator[int], copied: set[int]
    ) -> None:
        """Copy block after block, until none is left or it is stopped."""
        for place in places:
            if landing.stopped:
                return
            piece = frame.pieces[place]
            at = piece.slot * self._block_bytes
            landing.copy(place, self._memory[at : at + piece.num_bytes])
            copied.add(place)

    def num_following(self, frame: Frame) -> int:
        return 0

    def close(self) -> None:
        self._helper.shutdown(wait=False)


class ShmDialer:
    """Connects to one receiver on this machine."""

    link = "shm"

    def __init__(self, address: str, config: LinkConfig, memory: BlockMemory) -> None:
        self._name = address.partition("://")[2]
        if not self._name:
            raise ConfigError(f"{address!r} is no address of a link")
        if not isinstance(memory, OneMemory) or memory.file is None:
            raise ConfigError(
                "the blocks of this instance are not in shared memory: "
                "all peers of a link 'shm' have to be started with it"
            )
        self._file = memory.file
        self._num_bytes = len(memory.memory)
        self._timeout_s = config.connect_timeout_s
        self.frame_bytes = self.first_bytes = FRAME_BYTES

    def dial(self, greeting: Greeting, patience: Patience) -> "ShmOutbound":
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(self._timeout_s)
            connected.connect(f"\0{self._name}")
            stream = Stream(connected)
            _check_user(stream)
            key = greet(stream, greeting, patience).key
            pledges = FrameValidity(_NUM_FRAMES)
            offer = _OFFER.pack(self._num_bytes)
            socket.send_fds(connected, [offer], [self._file, pledges.file])
        except OSError as error:
            connected.close()
            raise LinkBroken(f"{self._name}: {error}", PushFailure.UNREACHABLE) from error
        except BaseException:
            connected.close()
            raise
        return ShmOutbound(stream, key, pledges)

    def close(self) -> None:
        """There is nothing but connections."""


class ShmOutbound:
    """Payloads that stay where they are."""

    def __init__(self, stream: Stream, key: bytes, pledges: FrameValidity) -> None:
        self.stream = stream
        self._key = key
        self._pledges = pledges

    def carry(
        self,
        number: int,
        lease: int,
        pieces: Sequence[BlockPiece],
        views: Sequence[memoryview],
        patience: Patience,
    ) -> None:
        word = self._pledges.give(number, patience)
        frame = make_frame(number, lease, word, tuple(map(announce, pieces)))
        self.stream.send([encode_frame(frame, self._key)], patience)

    def answered(self, number: int) -> None:
        self._pledges.release(number)

    def withdraw(self, number: int) -> None:
        self._pledges.withdraw(number)

    def close(self) -> None:
        """The stream is its connection's."""


def _check_user(stream: Stream) -> None:
    """Only processes of our own user, or the system's, share memory with us."""
    raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user not in (os.getuid(), 0):
        raise Malformed(f"a peer of user {user}", PushFailure.REFUSED)


def _take_memory(stream: Stream, patience: Patience) -> tuple[memoryview, PeerFrameValidity]:
    """The memory that a sender hands over, and what it pledges of it, mapped."""
    raw, files = _receive_files(stream, patience)
    try:
        if len(raw) != _OFFER.size or len(files) != _NUM_FILES:
            raise Malformed("no memory where it should be handed over")
        memory = map_shared(files[0], _OFFER.unpack(raw)[0])
        return memory, PeerFrameValidity(map_shared(files[1], PLEDGES_BYTES))
    except (OSError, ValueError, OverflowError) as error:
        raise Malformed(f"something that is no memory to share: {error}") from error
    finally:
        for file in files:
            os.close(file)


def _receive_files(stream: Stream, patience: Patience) -> tuple[bytes, list[int]]:
    while True:
        try:
            raw, files, _, _ = socket.recv_fds(
                stream.socket, _OFFER.size, _NUM_FILES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            patience()
        except OSError as error:
            raise LinkBroken(f"the peer is gone: {error}") from error
        else:
            return raw, files
