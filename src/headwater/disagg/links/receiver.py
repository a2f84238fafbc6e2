"""The receiving end of every link: connections, frames, verification, answers.

One thread accepts connections, and one serves each connection. Links differ in where a frame's
payload is; each link has its own `Inbound` for this. A peer that breaks the protocol is
disconnected, and no other peer is affected.
"""

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event, Lock, Thread
from typing import Protocol, runtime_checkable

from headwater.clock import Clock
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.frames import (
    FRAME_BYTES,
    Frame,
    decode_frame,
    encode_answer,
    table_bytes,
)
from headwater.disagg.links.interface import BlockMemory, Deliver
from headwater.disagg.links.leases import ArrivingBlocks, LeaseBook
from headwater.disagg.peering.handshake import (
    HandshakeResult,
    HandshakeTerms,
    LinkSession,
    ServerHandshake,
    timeout_check,
)
from headwater.disagg.peering.stream import TICK_S, Stream, WaitCheck
from headwater.disagg.peering.tls import Tls
from headwater.disagg.protocol.errors import LinkBroken, Malformed
from headwater.disagg.protocol.push import PushFailure

log = logging.getLogger(__name__)

_SCRATCH_BYTES = 1 << 18
_MAX_UNAUTHENTICATED = 64
"""Maximum number of connections whose handshake has not ended. Each has a thread for at most
`connect_timeout_s`."""


class Inbound(Protocol):
    """Writes the payloads of one connection to slots."""

    max_bytes: int
    """Largest payload of a frame."""

    def receive(self, frame: Frame, arriving: ArrivingBlocks, check_wait: WaitCheck) -> int:
        """Fill the targets of `arriving` and verify them; returns the number of bytes left to skip.

        It returns within a tick once `arriving` is `stopped`, whatever the peer does.
        """

    def num_following(self, frame: Frame) -> int:
        """Number of payload bytes that follow a frame on the connection."""

    def close(self) -> None:
        """Release what the connection used: it has ended."""


@runtime_checkable
class BackgroundInbound(Inbound, Protocol):
    """The `Inbound` of a link that copies in the background: `receive` only starts the copies
    of a frame.

    The next frames are started before this one is finished, so that the device always has work.
    """

    max_started: int
    """Maximum number of frames that are started and not finished. A fence waits for them."""

    def finish(self, frame: Frame, arriving: ArrivingBlocks) -> None:
        """Wait for the copies of the oldest frame that was started, and note which blocks are
        complete. Afterwards nothing writes to its targets."""


class LinkAcceptor(Protocol):
    """The receiver's part of one kind of link."""

    link: str
    address: str
    listener: socket.socket
    tls: Tls | None
    """Encrypts connections; None if TLS is not configured."""

    def admit(
        self, handshake: ServerHandshake, stream: Stream, check_wait: WaitCheck
    ) -> tuple[LinkSession, Inbound]:
        """Accept or refuse a sender that has proved the token."""

    def close(self) -> None:
        """Release what does not belong to a connection."""


class StreamReceiver:
    """A `Receiver` with a listening socket."""

    def __init__(
        self,
        acceptor: LinkAcceptor,
        memory: BlockMemory,
        deliver: Deliver,
        config: LinkConfig,
        clock: Clock,
    ) -> None:
        self.address = acceptor.address
        self._acceptor = acceptor
        self._config = config
        self._clock = clock
        self._terms = HandshakeTerms(acceptor.link, config.token, memory.block_bytes)
        self._book = LeaseBook(memory, deliver)
        self._lock = Lock()
        self._streams: dict[Stream, Thread] = {}
        self._unauthenticated: dict[Stream, Stream] = {}
        """Connections during their handshake, oldest first."""

        self._num_served = 0
        self._closed = Event()
        self._accept_thread = Thread(
            target=self._accept, name=f"{acceptor.link}-accept", daemon=True
        )
        self._accept_thread.start()

    def open(self, lease: int, slots: Sequence[int]) -> None:
        self._book.open(lease, slots)

    def fence(self, lease: int) -> None:
        self._book.fence(lease)

    def close(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            threads = list(self._streams.items())
        self._book.fence_all()
        with contextlib.suppress(OSError):
            self._acceptor.listener.shutdown(socket.SHUT_RDWR)
        for stream, _ in threads:
            stream.shut()
        for thread in (self._accept_thread, *(thread for _, thread in threads)):
            thread.join(self._config.stall_timeout_s)
        self._acceptor.listener.close()
        self._acceptor.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connected, _ = self._acceptor.listener.accept()
                stream = Stream(connected)
            except OSError as error:
                if not self._closed.wait(TICK_S):
                    log.warning(
                        "cannot accept a link connection: address=%s error=%s",
                        self.address,
                        error,
                    )
                continue
            name = f"{self._acceptor.link}-receive"
            thread = Thread(
                target=self._serve_connection, args=(stream,), name=name, daemon=True
            )
            oldest = None
            with self._lock:
                if self._closed.is_set():
                    stream.close()
                    continue
                # Close the oldest one and not this one: a stranger that keeps many connections
                # open must not keep senders out.
                if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                    oldest = self._unauthenticated.pop(next(iter(self._unauthenticated)))
                self._unauthenticated[stream] = stream
                self._streams[stream] = thread
            thread.start()
            if oldest is not None:
                oldest.shut()

    def _serve_connection(self, stream: Stream) -> None:
        """Serve one connection from its handshake to its end."""
        try:
            self._handshake(stream)
        except LinkBroken as error:
            level = logging.WARNING if isinstance(error, Malformed) else logging.DEBUG
            log.log(level, "link connection ended: address=%s reason=%s", self.address, error)
        except Exception:
            log.exception("link connection ended by a bug: address=%s", self.address)
        finally:
            with self._lock:
                self._streams.pop(stream, None)
                self._unauthenticated.pop(stream, None)
            stream.shut()
            stream.close()

    def _handshake(self, connected: Stream) -> None:
        check_wait = timeout_check(self._clock, self._config.connect_timeout_s)
        tls = self._acceptor.tls
        stream = connected if tls is None else tls.accept(connected, check_wait)
        handshake = ServerHandshake(stream, self._terms, check_wait)
        with self._lock:
            self._unauthenticated.pop(connected, None)
            full = self._num_served >= self._config.max_senders
            self._num_served += not full
        if full:
            handshake.refuse(HandshakeResult.BUSY)
        try:
            session, inbound = self._acceptor.admit(handshake, stream, check_wait)
            try:
                timeout_s = self._config.stall_timeout_s
                stall = partial(_stall, stream, self._clock, timeout_s)
                _Connection(self._book, stream, session.key, inbound, stall).serve()
            finally:
                inbound.close()
        finally:
            with self._lock:
                self._num_served -= 1


class _Connection:
    """One authenticated sender."""

    def __init__(
        self,
        book: LeaseBook,
        stream: Stream,
        key: bytes,
        inbound: Inbound,
        stall: Callable[[], WaitCheck],
    ) -> None:
        """`stall` limits how long the peer may be silent from now on."""
        self._book = book
        self._stream = stream
        self._key = key
        self._inbound = inbound
        self._background = inbound if isinstance(inbound, BackgroundInbound) else None
        self._stall = stall
        self._head = memoryview(bytearray(FRAME_BYTES))
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._started: deque[tuple[Frame, ArrivingBlocks]] = deque()
        """Frames whose blocks are being copied in the background, oldest first."""

    def serve(self) -> None:
        """Receive frames and answer each, until the connection ends."""
        number = 0
        try:
            while True:
                begun = self._begun()
                if not begun:
                    self._stream.await_readable()
                    continue
                check_wait = self._stall()
                frame = self._frame(begun, check_wait)
                if frame.number != number or frame.payload_bytes > self._inbound.max_bytes:
                    raise Malformed("frame out of order or too large")
                number += 1
                self._receive(frame, check_wait)
        finally:
            while self._started:
                self._end_oldest()

    def _begun(self) -> int:
        """Number of bytes of the next frame's head that have arrived."""
        while self._started:
            begun = self._stream.receive_some([self._head], socket.MSG_DONTWAIT)
            if 0 < begun < FRAME_BYTES:  # a slow peer must not delay the end of started frames
                self._answer_started()
            if begun:
                return begun
            self._answer_oldest()
        return self._stream.receive_some([self._head])

    def _frame(self, begun: int, check_wait: WaitCheck) -> Frame:
        self._stream.fill(self._head[begun:], check_wait)
        table = bytearray(table_bytes(self._head))
        rest = memoryview(table)
        if self._started:
            rest = rest[self._stream.receive_some([rest], socket.MSG_DONTWAIT) :]
            if rest:
                self._answer_started()
        self._stream.fill(rest, check_wait)
        return decode_frame(
            bytes(self._head), bytes(table), self._key, block_bytes=self._book.block_bytes
        )

    def _receive(self, frame: Frame, check_wait: WaitCheck) -> None:
        """Write the blocks of a frame and answer the frame. A link that copies in the
        background only starts the copies here."""
        arriving = self._book.begin_write(frame.lease, frame.pieces)
        if arriving is PushFailure.TWICE and self._started:
            self._answer_started()
            arriving = self._book.begin_write(frame.lease, frame.pieces)
        if isinstance(arriving, PushFailure):
            self._answer_started()
            self._skip(self._inbound.num_following(frame), check_wait)
            self._answer(frame, arriving)
            return
        try:
            left = self._inbound.receive(frame, arriving, check_wait)
        except BaseException:
            self._book.end_write(arriving, frame.pieces)
            raise
        if self._background is not None:
            # After the start of this frame's copies, so that the device copies while an earlier
            # frame is answered.
            self._started.append((frame, arriving))
            while len(self._started) >= self._background.max_started:
                self._answer_oldest()
            return
        self._book.end_write(arriving, frame.pieces)
        self._skip(left, check_wait)
        self._answer(frame, _failure(arriving))

    def _answer_started(self) -> None:
        """Wait for all frames whose copies were started, and answer them."""
        while self._started:
            self._answer_oldest()

    def _answer_oldest(self) -> None:
        """Wait for the oldest frame whose copies were started, and answer it."""
        frame, arriving = self._end_oldest()
        self._answer(frame, _failure(arriving))

    def _end_oldest(self) -> tuple[Frame, ArrivingBlocks]:
        """Wait for the oldest frame whose copies were started; afterwards nothing writes to its
        slots."""
        assert self._background is not None, "only copies in the background are started"
        frame, arriving = started = self._started.popleft()
        try:
            self._background.finish(frame, arriving)
        finally:
            self._book.end_write(arriving, frame.pieces)
        return started

    def _answer(self, frame: Frame, failure: PushFailure | None) -> None:
        self._stream.send([encode_answer(frame.number, failure)], self._stall())

    def _skip(self, num_bytes: int, check_wait: WaitCheck) -> None:
        """Discard payload of a refused frame."""
        while num_bytes:
            part = self._scratch[:num_bytes]
            self._stream.fill(part, check_wait)
            num_bytes -= len(part)


def _failure(arriving: ArrivingBlocks) -> PushFailure | None:
    """Why not all blocks of a finished frame were received; None if all were."""
    if len(arriving.good) == len(arriving.new):
        return None
    return PushFailure.FENCED if arriving.stopped else PushFailure.DAMAGED


def _stall(stream: Stream, clock: Clock, timeout_s: float) -> WaitCheck:
    """Limits how long a peer may send no byte in the middle of a frame."""
    end_s, seen = clock.now() + timeout_s, stream.num_received

    def check_wait() -> None:
        nonlocal end_s, seen
        if seen != stream.num_received:
            end_s, seen = clock.now() + timeout_s, stream.num_received
        elif clock.now() > end_s:
            raise LinkBroken(
                f"the peer sent nothing for {timeout_s:g} s in the middle of a frame"
            )

    return check_wait
