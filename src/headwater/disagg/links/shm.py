"""The `shm` link, for peers on one machine: the receiver copies from where the blocks lie.

    sender's slots ── a mapping of the same memory ──▶ copy, verify ──▶ receiver's slots

A sender hands over a descriptor of its whole block memory, on a Unix socket, once both have
proved the token. It is a sealed memfd: it has no name, so nothing is left behind when a process
dies; no peer can pull it away under a copy, nor write to it. A frame says in which slots of the
sender its blocks are; those stay as they are until it is answered. Should a sender give up
before, and put something else into them, then the checksum fails at the receiver.
"""

import os
import secrets
import socket
import struct
from collections.abc import Sequence

import numpy as np

from headwater.disagg.link import BlockMemory, OneMemory, Piece, PushFailure
from headwater.disagg.links.cells import Places
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.frames import Frame, Malformed, describe, encode_frame, make_frame
from headwater.disagg.links.hello import Greeting, Session, Welcome, greet
from headwater.disagg.links.landing import Landing
from headwater.disagg.links.stream import LinkBroken, Patience, Stream
from headwater.errors import ConfigError
from headwater.transfer.shared import map_shared

_OFFER = struct.Struct("<Q")
"""Bytes of the memory that is handed over with it."""

_CREDENTIALS = struct.Struct("3i")
_NUM_FRAMES = 2
"""One is read for its checksums while the other is copied. With more on their way it was slower:
a block that was read long ago is presumably in no cache any more when it is copied."""


class ShmDock:
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
    ) -> tuple[Session, "ShmInbound"]:
        _check_user(stream)
        session = welcome.accept()
        return session, ShmInbound(_take_memory(stream, patience), self._block_bytes)

    def close(self) -> None:
        """There is nothing but the listener."""


class ShmInbound:
    """Payloads in the slots of the sender; copies them into ours, whose only writer it is."""

    def __init__(self, memory: memoryview, block_bytes: int) -> None:
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._block_bytes = block_bytes
        self._num_slots = len(memory) // block_bytes

    def receive(self, frame: Frame, landing: Landing, patience: Patience) -> int:
        if max(piece.slot for piece in frame.pieces) >= self._num_slots:
            raise Malformed("a block that is outside the sender's memory")
        pairs = zip(landing.views, frame.pieces, strict=True)
        for place, (view, piece) in enumerate(pairs):
            if landing.stopped:
                break
            if view is not None:
                at = piece.slot * self._block_bytes
                source = self._memory[at : at + piece.num_bytes]
                np.copyto(np.frombuffer(view, dtype=np.uint8), source)
                landing.verify(place, piece)
        return 0

    def skip(self, num_bytes: int, patience: Patience) -> None:
        """Nothing of it is on the way."""

    def close(self) -> None:
        """The mapping goes with the connection."""


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
        self.frame_bytes = config.frame_bytes

    def dial(self, greeting: Greeting, patience: Patience) -> "ShmOutbound":
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(self._timeout_s)
            connected.connect(f"\0{self._name}")
            stream = Stream(connected)
            _check_user(stream)
            key = greet(stream, greeting, patience).key
            offer = _OFFER.pack(self._num_bytes)
            socket.send_fds(connected, [offer], [self._file])
        except OSError as error:
            connected.close()
            raise LinkBroken(f"{self._name}: {error}", PushFailure.UNREACHABLE) from error
        except BaseException:
            connected.close()
            raise
        return ShmOutbound(stream, key)

    def close(self) -> None:
        """There is nothing but connections."""


class ShmOutbound:
    """Payloads that stay where they are."""

    def __init__(self, stream: Stream, key: bytes) -> None:
        self.stream = stream
        self._key = key
        self._places = Places(_NUM_FRAMES)

    def carry(
        self,
        number: int,
        lease: int,
        pieces: Sequence[Piece],
        views: Sequence[memoryview],
        patience: Patience,
    ) -> None:
        self._places.take(number, patience)
        frame = make_frame(number, lease, 0, tuple(map(describe, pieces, views)))
        self.stream.send([encode_frame(frame, self._key)], patience)

    def answered(self, number: int) -> None:
        self._places.release(number)

    def close(self) -> None:
        """The stream is its connection's."""


def _check_user(stream: Stream) -> None:
    """Only processes of our own user, or the system's, share memory with us."""
    raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user not in (os.getuid(), 0):
        raise Malformed(f"a peer of user {user}", PushFailure.REFUSED)


def _take_memory(stream: Stream, patience: Patience) -> memoryview:
    """The memory that a sender hands over, mapped."""
    raw, files = _receive_files(stream, patience)
    try:
        if len(raw) != _OFFER.size or len(files) != 1:
            raise Malformed("no memory where it should be handed over")
        return map_shared(files[0], _OFFER.unpack(raw)[0])
    except (OSError, ValueError, OverflowError) as error:
        raise Malformed(f"something that is no memory to share: {error}") from error
    finally:
        for file in files:
            os.close(file)


def _receive_files(stream: Stream, patience: Patience) -> tuple[bytes, list[int]]:
    while True:
        try:
            raw, files, _, _ = socket.recv_fds(
                stream.socket, _OFFER.size, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            patience()
        except OSError as error:
            raise LinkBroken(f"the peer is gone: {error}") from error
        else:
            return raw, files
