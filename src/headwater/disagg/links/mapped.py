"""What `shm` and `cuda` share: the receiver maps the sender's blocks and copies them itself.

    sender ── Unix socket: handshake, then descriptors of its memory ──▶ receiver
    sender ── frames: only tables, each with a validity word ──────────▶ receiver

A descriptor is passed only after both ends have proved the token and that they run as the same
user. The descriptor is the only way to the memory, which has no name that another process could
open.
"""

import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from headwater.disagg.links.frame_validity import (
    VALIDITY_BYTES,
    FrameValidity,
    PeerFrameValidity,
)
from headwater.disagg.links.frames import announce, encode_frame, make_frame
from headwater.disagg.peering.handshake import HandshakeTerms, client_handshake
from headwater.disagg.peering.stream import Stream, WaitCheck
from headwater.disagg.protocol.errors import LinkBroken, Malformed
from headwater.disagg.protocol.push import BlockPiece, PushFailure
from headwater.errors import ConfigError
from headwater.transfer.shared import map_shared

_NUM_FRAMES = 8
"""Frames in flight: the next frames are there before the peer has copied the last one."""

_OFFER = struct.Struct("<Q")
"""Size of the memory whose descriptor is passed with it."""

_NUM_FILES = 2
"""The memory, and the words that tell whether its frames are valid."""

FrameSizes: TypeAlias = tuple[int, int]
"""Payload of the first frame of a push, and of the largest one."""

_CREDENTIALS = struct.Struct("3i")


class MappedOutbound:
    """Sends frames; payloads stay in the sender's memory."""

    def __init__(
        self, stream: Stream, key: bytes, validity: FrameValidity, sizes: FrameSizes
    ) -> None:
        self.stream = stream
        self.first_bytes, self.frame_bytes = sizes
        self._key = key
        self._validity = validity

    def send_frame(
        self,
        number: int,
        lease: int,
        pieces: Sequence[BlockPiece],
        views: Sequence[memoryview],
        check_wait: WaitCheck,
    ) -> None:
        word = self._validity.mark_valid(number, check_wait)
        frame = make_frame(number, lease, word, tuple(map(announce, pieces)))
        self.stream.send([encode_frame(frame, self._key)], check_wait)

    def answered(self, number: int) -> None:
        self._validity.release(number)

    def withdraw(self, number: int) -> None:
        self._validity.invalidate(number)

    def close(self) -> None:
        """Nothing to do: the connection owns the stream."""


def listen_locally() -> tuple[socket.socket, str]:
    """An abstract Unix socket, whose name disappears with the process; and its name."""
    name = f"headwater-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(64)
    return listener, name


def name_of(address: str) -> str:
    """The socket's name in an address such as shm://name."""
    link, _, name = address.partition("://")
    if not name:
        raise ConfigError(f"{address!r} is not a link address; write {link}://name")
    return name


def _connect_locally(name: str, timeout_s: float) -> Stream:
    """A connection to a process of the same user on this machine."""
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(timeout_s)
        connected.connect(f"\0{name}")
        stream = Stream(connected)
        check_user(stream)
    except OSError as error:
        connected.close()
        raise LinkBroken(f"{name}: {error}", PushFailure.UNREACHABLE) from error
    except BaseException:
        connected.close()
        raise
    return stream


def check_user(stream: Stream) -> None:
    """Malformed unless the peer runs as the same user or as root."""
    raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user not in (os.getuid(), 0):
        raise Malformed(
            f"the peer runs as user {user}; a link that maps memory needs the same user",
            PushFailure.REFUSED,
        )


def offer_memory(
    name: str,
    timeout_s: float,
    terms: HandshakeTerms,
    *,
    memory: tuple[int, int],
    sizes: FrameSizes,
    check_wait: WaitCheck,
) -> MappedOutbound:
    """Connect to the receiver `name` and pass it the descriptor of `memory`, with its size."""
    file, num_bytes = memory
    stream = _connect_locally(name, timeout_s)
    try:
        key = client_handshake(stream, terms, check_wait).key
        validity = FrameValidity(_NUM_FRAMES)
        _send_files(stream, _OFFER.pack(num_bytes), [file, validity.file])
    except BaseException:
        stream.close()
        raise
    return MappedOutbound(stream, key, validity, sizes)


@contextmanager
def offered_memory(
    stream: Stream, check_wait: WaitCheck
) -> Iterator[tuple[int, int, PeerFrameValidity]]:
    """The descriptor and size of the memory that a sender offers, and its validity words.

    The body of the `with` statement maps the memory; afterwards the descriptor is closed.
    Malformed if nothing usable was passed.
    """
    raw, files = _receive_files(stream, check_wait)
    try:
        if len(raw) != _OFFER.size or len(files) != _NUM_FILES:
            raise Malformed("the peer passed no memory descriptors")
        validity = PeerFrameValidity(map_shared(files[1], VALIDITY_BYTES))
        yield files[0], _OFFER.unpack(raw)[0], validity
    except (OSError, ValueError, OverflowError) as error:
        raise Malformed(f"cannot map the peer's memory: {error}") from error
    finally:
        for file in files:
            os.close(file)


def _send_files(stream: Stream, raw: bytes, files: Sequence[int]) -> None:
    """Send a few bytes and descriptors."""
    try:
        socket.send_fds(stream.socket, [raw], files)
    except OSError as error:
        raise LinkBroken(f"connection lost: {error}") from error


def _receive_files(stream: Stream, check_wait: WaitCheck) -> tuple[bytes, list[int]]:
    """Bytes and descriptors that a peer sent together. The caller closes the descriptors."""
    while True:
        try:
            raw, files, _, _ = socket.recv_fds(
                stream.socket, _OFFER.size, _NUM_FILES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            check_wait()
        except OSError as error:
            raise LinkBroken(f"connection lost: {error}") from error
        else:
            return raw, files
