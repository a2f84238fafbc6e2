"""Messages between rank 0 and another rank: framed bytes over a socket pair, no pickle.

    kind u8 | 3 unused | payload bytes u32 | payload

File descriptors are sent with the first byte of a frame. Both ends are processes of one engine
on one machine.
"""

import array
import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

_HEADER = struct.Struct("<BxxxI")
_MAX_FILES = 1
_BUFFER_BYTES = 4 << 20
"""Socket buffer requested for each direction, so that a busy rank does not delay rank 0."""

_MAX_PAYLOAD_BYTES = 1 << 30


class RankMessage(IntEnum):
    """The kind of a frame. Rank 0 sends those up to WARM; the other ranks send the rest."""

    LOAD = 1
    """Load this model; the answer is LOADED."""

    MEET = 2
    """Join the process group through this file."""

    OPEN = 3
    """Create a runner of these sizes; the answer is READY."""

    STEP = 4
    """Compute this batch. There is no answer: collectives join the results."""

    SLAB = 5
    """Map the attached file as host memory for copies; the answer is MAPPED."""

    DROP_SLAB = 6
    COPY = 7
    """Copy blocks between this rank's pool and a slab; the answer is COPIED."""

    MARK = 8
    """These slots were written."""

    WARM = 9
    """Do this part of the warm-up, as rank 0 does."""

    LOADED = 20
    READY = 21
    MAPPED = 22
    COPIED = 23
    FAILED = 24
    """The rank cannot continue; the payload is the reason."""


class RankFrame(NamedTuple):
    """One message."""

    kind: RankMessage
    payload: memoryview
    files: tuple[int, ...] = ()
    """Descriptors that now belong to the receiver."""


class ChannelClosed(OSError):
    """The other end is gone."""


class RankChannel:
    """One end of a socket pair. One thread receives; callers of `send` need a lock."""

    def __init__(
        self, sock: socket.socket, *, send_timeout_s: float, spin_s: float = 0.0
    ) -> None:
        """A receiver polls for its next message for `spin_s` before it sleeps. A sleeping
        thread wakes about 50 µs late, and every step would wait for that."""
        self._socket = sock
        self._spin_s = spin_s
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        # A rank that reads nothing for this long hangs; then sending fails instead of waiting.
        whole, part = divmod(send_timeout_s, 1.0)
        limit = struct.pack("ll", int(whole), int(part * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(
        self, kind: RankMessage, payload: bytes | memoryview = b"", files: Sequence[int] = ()
    ) -> None:
        """Queue a message. Raises OSError if the other end is gone or reads nothing."""
        header = _HEADER.pack(kind, len(payload))
        beside = []
        if files:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        sent = self._socket.sendmsg([header, payload], beside)
        if sent < _HEADER.size:
            self._socket.sendall(header[sent:])
            sent = _HEADER.size
        if sent < _HEADER.size + len(payload):
            self._socket.sendall(memoryview(payload)[sent - _HEADER.size :])

    def receive(self) -> RankFrame:
        """Wait for the next message. Raises ChannelClosed when there will be none."""
        header, files = self._receive_header()
        number, size = _HEADER.unpack(header)
        if size > _MAX_PAYLOAD_BYTES:
            raise ChannelClosed(f"a message of {size} bytes is more than any rank sends")
        payload = bytearray(size)
        self._fill(memoryview(payload))
        return RankFrame(RankMessage(number), memoryview(payload), files)

    def close(self) -> None:
        """Close this end, which wakes a receiver at the other end. Calling it twice is safe."""
        with contextlib.suppress(OSError):  # the other end may be gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive_header(self) -> tuple[bytes, tuple[int, ...]]:
        try:
            data, beside = self._receive_soon() or self._receive_some(0)
        except ConnectionError as exc:
            raise ChannelClosed("the other end is gone") from exc
        files: list[int] = []
        for level, kind, content in beside:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files += array.array("i", content[: len(content) // 4 * 4])
        if not data:
            raise ChannelClosed("the other end is gone")
        if len(data) < _HEADER.size:
            rest = bytearray(_HEADER.size - len(data))
            self._fill(memoryview(rest))
            data += bytes(rest)
        return data, tuple(files)

    def _receive_soon(self) -> tuple[bytes, list[Any]] | None:
        """Poll for the next message for a short time; None if nothing came."""
        end_s = time.perf_counter() + self._spin_s
        while time.perf_counter() < end_s:
            try:
                return self._receive_some(socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()  # other ranks may share this core
        return None

    def _receive_some(self, flags: int) -> tuple[bytes, list[Any]]:
        """The first bytes of a frame, and the attached descriptors."""
        room = socket.CMSG_SPACE(_MAX_FILES * array.array("i").itemsize)
        flags |= socket.MSG_CMSG_CLOEXEC
        data, beside, _, _ = self._socket.recvmsg(_HEADER.size, room, flags)
        return data, beside

    def _fill(self, into: memoryview) -> None:
        while len(into):
            try:
                count = self._socket.recv_into(into)
            except ConnectionError as exc:
                raise ChannelClosed("the other end is gone") from exc
            if not count:
                raise ChannelClosed("the other end is gone")
            into = into[count:]


def close_files(files: Sequence[int]) -> None:
    """Close descriptors that came with a frame."""
    for file in files:
        os.close(file)
