"""The `tcp` link, the reference: payloads follow their frames, from slots and into slots.

`sendmsg` gathers from the sender's slots, and `recvmsg_into` scatters into the receiver's slots.
No byte is copied into a Python object, and neither call holds the interpreter lock. Each block is
followed by its checksum: while the peer receives one group of blocks, the sender reads the next.
"""

import socket
from collections.abc import Iterator, Sequence

from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.frames import (
    CHECKSUM_BYTES,
    FIRST_BYTES,
    Frame,
    announce,
    encode_frame,
    make_frame,
)
from headwater.disagg.links.leases import ArrivingBlocks
from headwater.disagg.peering.handshake import (
    HandshakeTerms,
    LinkSession,
    ServerHandshake,
    client_handshake,
)
from headwater.disagg.peering.stream import (
    Stream,
    WaitCheck,
    advertised_address,
    connect,
    listen,
    parse_host_port,
)
from headwater.disagg.peering.tls import Tls
from headwater.disagg.protocol.push import BlockPiece
from headwater.storage.calls import advance
from headwater.storage.codec import checksum

_STRIDE_BYTES = 1 << 19
"""Size of a group of blocks that is sent, or received and verified, at once. The kernel's
socket buffers keep both ends busy meanwhile."""

_FRAME_BYTES = 16 << 20
"""Large enough that the fixed cost of a frame, about 70 µs at the receiver, is small."""


class TcpAcceptor:
    """Listens on a port."""

    link = "tcp"

    def __init__(self, config: LinkConfig, block_bytes: int, tls: Tls | None) -> None:
        self._max_bytes = max(_FRAME_BYTES, block_bytes)
        self.listener = listen(config.host, config.port)
        self.address = f"tcp://{link_address(config, self.listener)}"
        self.tls = tls

    def admit(
        self, handshake: ServerHandshake, stream: Stream, check_wait: WaitCheck
    ) -> tuple[LinkSession, "TcpInbound"]:
        return handshake.accept(), TcpInbound(stream, self._max_bytes)

    def close(self) -> None:
        """Nothing to do: the receiver closes the listening socket."""


class TcpInbound:
    """Receives the payloads that follow their frames, directly into slots."""

    def __init__(self, stream: Stream, max_bytes: int) -> None:
        self._stream = stream
        self.max_bytes = max_bytes

    def receive(self, frame: Frame, arriving: ArrivingBlocks, check_wait: WaitCheck) -> int:
        views = [
            memoryview(bytearray(piece.num_bytes)) if view is None else view
            for view, piece in zip(arriving.views, frame.pieces, strict=True)
        ]
        left = self.num_following(frame)
        for start, end in _strides(views):
            sums = [memoryview(bytearray(CHECKSUM_BYTES)) for _ in range(start, end)]
            parts = [part for pair in zip(views[start:end], sums, strict=True) for part in pair]
            left -= self._fill(parts, arriving, check_wait)
            if arriving.stopped:
                break
            for at, expected in enumerate(sums, start):
                arriving.verify(at, bytes(expected))
        return left

    def num_following(self, frame: Frame) -> int:
        return frame.payload_bytes + CHECKSUM_BYTES * len(frame.pieces)

    def close(self) -> None:
        """Nothing to do: the connection owns the stream."""

    def _fill(
        self, views: list[memoryview], arriving: ArrivingBlocks, check_wait: WaitCheck
    ) -> int:
        """Fill the views unless the lease is fenced; returns the number of bytes received."""
        num_bytes = 0
        while views and not arriving.stopped:
            got = self._stream.receive_some(views)
            if not got:
                check_wait()
            views = advance(views, got)
            num_bytes += got
        return num_bytes


class TcpDialer:
    """Connects to one port."""

    link = "tcp"

    def __init__(self, address: str, config: LinkConfig, tls: Tls | None = None) -> None:
        self._target = parse_host_port(address)
        self._timeout_s = config.connect_timeout_s
        self._tls = tls

    def dial(self, terms: HandshakeTerms, check_wait: WaitCheck) -> "TcpOutbound":
        stream = connect(self._target, self._timeout_s)
        try:
            if self._tls is not None:
                stream = self._tls.connect(stream, check_wait)
            return TcpOutbound(stream, client_handshake(stream, terms, check_wait).key)
        except BaseException:
            stream.close()
            raise

    def close(self) -> None:
        """Nothing to do: only connections hold resources."""


class TcpOutbound:
    """Sends frames, each followed by its payload."""

    frame_bytes, first_bytes = _FRAME_BYTES, FIRST_BYTES

    def __init__(self, stream: Stream, key: bytes) -> None:
        self.stream = stream
        self._key = key

    def send_frame(
        self,
        number: int,
        lease: int,
        pieces: Sequence[BlockPiece],
        views: Sequence[memoryview],
        check_wait: WaitCheck,
    ) -> None:
        frame = make_frame(number, lease, 0, tuple(map(announce, pieces)))
        parts: list[memoryview | bytes] = [encode_frame(frame, self._key)]
        for start, end in _strides(views):
            for view in views[start:end]:
                parts += [view, checksum(view)]
            self.stream.send(parts, check_wait)
            parts = []

    def answered(self, number: int) -> None:
        """Nothing to do: no memory is held for a frame."""

    def withdraw(self, number: int) -> None:
        """Nothing to do: the bytes have been sent."""

    def close(self) -> None:
        """Nothing to do: the connection owns the stream."""


def link_address(config: LinkConfig, listener: socket.socket) -> str:
    """HOST:PORT for senders."""
    return advertised_address(
        listener, config.host, config.advertised_host, config.advertised_port
    )


def _strides(views: Sequence[memoryview]) -> Iterator[tuple[int, int]]:
    """Ranges of views that are sent or received at once."""
    start = num_bytes = 0
    for end, view in enumerate(views, 1):
        num_bytes += len(view)
        if num_bytes >= _STRIDE_BYTES or end == len(views):
            yield start, end
            start, num_bytes = end, 0
