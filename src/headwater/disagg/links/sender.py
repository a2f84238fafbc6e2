"""The sending end of every link: a queue of pushes, frames, answers, outcomes.

One thread sends and checks deadlines; one thread for each connection receives answers. A
connection is made when it is needed, and again after it broke. Links differ in how a frame's
payload is sent; each link has its own `Outbound` for this.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from threading import Condition, Thread
from typing import Protocol

from headwater.clock import Clock
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.frames import ANSWER_BYTES, MAX_PIECES, decode_answers
from headwater.disagg.links.interface import BlockMemory, Deliver
from headwater.disagg.peering.handshake import HandshakeTerms
from headwater.disagg.peering.stream import Stream, WaitCheck
from headwater.disagg.protocol.errors import LinkBroken
from headwater.disagg.protocol.push import (
    BlockPiece,
    Push,
    PushDone,
    PushFailed,
    PushFailure,
    SenderEvent,
)

log = logging.getLogger(__name__)

_JOIN_S = 10.0


class Outbound(Protocol):
    """Sends the frames of one connection."""

    stream: Stream
    frame_bytes: int
    """Preferred payload of a frame."""

    first_bytes: int
    """Payload of the first frame of a push. Each next frame is twice as large, up to the limit.
    """

    def send_frame(
        self,
        number: int,
        lease: int,
        pieces: Sequence[BlockPiece],
        views: Sequence[memoryview],
        check_wait: WaitCheck,
    ) -> None:
        """Send a frame. Afterwards the calling thread does not read the views again. If the
        peer or a transfer engine reads them, it does so before the peer answers."""

    def answered(self, number: int) -> None:
        """Release what an answered frame holds. LinkBroken if that frame was not sent."""

    def withdraw(self, number: int) -> None:
        """Make a frame invalid, because its push was given up without an answer. The slots may
        change at once, so a copy that the peer makes from then on must not count."""

    def close(self) -> None:
        """Release what the connection used: it has ended, but threads that use it may not have
        noticed yet."""


class Dialer(Protocol):
    """The sender's part of one kind of link."""

    link: str

    def dial(self, terms: HandshakeTerms, check_wait: WaitCheck) -> Outbound:
        """A new authenticated connection, or LinkBroken."""

    def close(self) -> None:
        """Release what does not belong to a connection."""


class _PendingPush:
    """A push without an outcome."""

    __slots__ = ("connection", "deadline_s", "failure", "push", "sending", "unanswered")

    def __init__(self, push: Push) -> None:
        self.push = push
        self.deadline_s = push.deadline_s
        self.connection: _Connection | None = None
        """Connection of its frames. A push does not move to another one."""

        self.unanswered: set[int] = set()
        """Numbers of the frames that were sent and not answered."""

        self.sending = True
        """Whether its slots are being read, or will be."""

        self.failure: PushFailure | None = None

    @property
    def has_ended(self) -> bool:
        return not self.sending and (self.failure is not None or not self.unanswered)


class _Connection:
    """One connection, and the pushes of its unanswered frames."""

    def __init__(self, outbound: Outbound) -> None:
        self.outbound = outbound
        self.next_number = 0
        self.waiting: dict[int, _PendingPush] = {}
        self.is_up = True
        self.listener: Thread | None = None


class StreamSender:
    """A `Sender` over connections that a `Dialer` makes."""

    def __init__(
        self,
        dialer: Dialer,
        memory: BlockMemory,
        deliver: Deliver,
        config: LinkConfig,
        clock: Clock,
    ) -> None:
        self._dialer = dialer
        self._memory = memory
        self._deliver = deliver
        self._config = config
        self._clock = clock
        self._terms = HandshakeTerms(dialer.link, config.token, memory.block_bytes)
        self._changed = Condition()
        self._queue: deque[_PendingPush] = deque()
        self._sent: dict[int, _PendingPush] = {}
        """Pushes whose frames were all sent and not all answered, by job."""

        self._sending: _PendingPush | None = None
        """The push that the sending thread is working on."""

        self._connection: _Connection | None = None
        self._closed = False
        self._thread = Thread(target=self._run, name=f"{dialer.link}-send", daemon=True)
        self._thread.start()

    def push(self, push: Push) -> None:
        with self._changed:
            if not self._closed:
                self._queue.append(_PendingPush(push))
                self._changed.notify_all()
                return
        self._deliver(PushFailed(push.job, PushFailure.CLOSED))

    def extend(self, lease: int, deadline_s: float) -> None:
        with self._changed:
            for pending in (*self._queue, *self._sent.values(), self._sending):
                if pending is not None and pending.push.lease == lease:
                    pending.deadline_s = max(pending.deadline_s, deadline_s)

    def cancel(self, lease: int) -> None:
        with self._changed:
            given_up = [pending for pending in self._queue if pending.push.lease == lease]
            for pending in given_up:
                self._queue.remove(pending)
        for pending in given_up:
            self._deliver(PushFailed(pending.push.job, PushFailure.CANCELLED))

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            connection = self._connection
            self._changed.notify_all()
        if connection is not None:
            connection.outbound.stream.shut()
        self._thread.join(_JOIN_S)
        self._dialer.close()

    def _run(self) -> None:
        while (pending := self._next()) is not None:
            self._send(pending)
        with self._changed:
            left = [*self._queue, *self._sent.values()]
            self._queue.clear()
            self._sent.clear()
            connection = self._connection
        for pending in left:
            pending.failure = PushFailure.CLOSED
            self._end(pending)
        if connection is not None:
            _retire(connection)

    def _next(self) -> _PendingPush | None:
        """The next push; waits for one and checks deadlines meanwhile. None after `close`."""
        while True:
            self._expire()
            with self._changed:
                if self._closed:
                    return None
                if self._queue:
                    self._sending = self._queue.popleft()
                    return self._sending
                self._changed.wait(self._wait_s())

    def _wait_s(self) -> float | None:
        """Time until the first deadline of a push that waits for answers."""
        if not self._sent:
            return None
        first = min(pending.deadline_s for pending in self._sent.values())
        return max(first - self._clock.now(), 0.0) + 1e-3

    def _expire(self) -> None:
        """Fail pushes whose deadline has passed, unless their slots are being read."""
        now = self._clock.now()
        with self._changed:
            late = [pending for pending in self._queue if pending.deadline_s <= now]
            for pending in late:
                self._queue.remove(pending)
            sent = [pending for pending in self._sent.values() if pending.deadline_s <= now]
            for pending in sent:
                del self._sent[pending.push.job]
            for pending in late + sent:
                pending.failure = PushFailure.TIMEOUT
        for pending in late + sent:
            self._end(pending)

    def _send(self, pending: _PendingPush) -> None:
        """Send all frames of a push, or note why not. Afterwards its slots are not read any
        more."""
        push = pending.push
        try:
            connection = pending.connection = self._connected(self._wait_check(pending))
            first, largest = connection.outbound.first_bytes, connection.outbound.frame_bytes
            for pieces in _frames(push.pieces, first, largest):
                if pending.failure is not None:
                    break
                self._send_frame(connection, pending, pieces)
        except LinkBroken as error:
            log.info("push failed: reason=%s", error)
            self._give_up(pending, error.reason)
        except Exception:
            log.exception("a push failed because of a bug")
            self._give_up(pending, PushFailure.LOST)
        with self._changed:
            pending.sending = False
            self._sending = None
            if not pending.has_ended:
                self._sent[push.job] = pending
                return
        self._end(pending)

    def _give_up(self, pending: _PendingPush, reason: PushFailure) -> None:
        with self._changed:
            if pending.failure is None:
                pending.failure = PushFailure.CLOSED if self._closed else reason
        if pending.connection is not None:
            self._drop(pending.connection, PushFailure.LOST)

    def _end(self, pending: _PendingPush) -> None:
        """Deliver the outcome of a push that was removed from all tables."""
        with self._changed:
            unanswered = list(pending.unanswered)
        for number in unanswered:
            assert pending.connection is not None
            pending.connection.outbound.withdraw(number)
        self._deliver(_outcome(pending))

    def _send_frame(
        self, connection: _Connection, pending: _PendingPush, pieces: Sequence[BlockPiece]
    ) -> None:
        push = pending.push
        views = [self._memory.view(piece.slot)[: piece.num_bytes] for piece in pieces]
        with self._changed:
            if not connection.is_up:
                raise LinkBroken("the connection has ended")
            number = connection.next_number
            connection.next_number += 1
            connection.waiting[number] = pending
            pending.unanswered.add(number)
        connection.outbound.send_frame(
            number, push.lease, pieces, views, self._wait_check(pending, connection)
        )

    def _wait_check(
        self, pending: _PendingPush, connection: _Connection | None = None
    ) -> WaitCheck:
        """The check of one push, to be called while a thread waits. It raises LinkBroken at the
        push's deadline, after `close`, and after the end of the connection."""

        def check_wait() -> None:
            if connection is not None and not connection.is_up:
                raise LinkBroken("the connection has ended")
            if self._closed:
                raise LinkBroken("the sender was closed", PushFailure.CLOSED)
            if self._clock.now() >= pending.deadline_s:
                raise LinkBroken("the deadline of the push has passed", PushFailure.TIMEOUT)
            self._expire()

        return check_wait

    def _connected(self, check_wait: WaitCheck) -> _Connection:
        """The current connection, or a new one."""
        check_wait()
        with self._changed:
            old = self._connection
        if old is not None and old.is_up:
            return old
        if old is not None:
            _retire(old)
        connection = _Connection(self._dialer.dial(self._terms, check_wait))
        listen = Thread(target=self._listen, args=(connection,), daemon=True)
        connection.listener = listen
        with self._changed:
            self._connection = connection
        listen.start()
        return connection

    def _listen(self, connection: _Connection) -> None:
        """Receive answers until the connection ends."""
        stream = connection.outbound.stream
        buffer = memoryview(bytearray(64 * ANSWER_BYTES))
        have = 0
        try:
            while True:
                got = stream.receive_some([buffer[have:]], 0)
                if not got:
                    stream.await_readable()
                have += got
                whole = have - have % ANSWER_BYTES
                for number, failure in decode_answers(buffer[:whole]):
                    self._answered(connection, number, failure)
                buffer[: have - whole] = bytes(buffer[whole:have])
                have -= whole
        except LinkBroken as error:
            log.debug("link connection ended: reason=%s", error)
        self._drop(connection, PushFailure.LOST)

    def _answered(
        self, connection: _Connection, number: int, failure: PushFailure | None
    ) -> None:
        with self._changed:
            pending = connection.waiting.pop(number, None)
            if pending is None:
                raise LinkBroken("answer to a frame that was not sent")
            pending.unanswered.remove(number)
            pending.failure = pending.failure or failure
            ended = pending.has_ended and self._sent.pop(pending.push.job, None) is not None
        connection.outbound.answered(number)
        if ended:
            self._end(pending)

    def _drop(self, connection: _Connection, reason: PushFailure) -> None:
        """End a lost connection, and every push that has an unanswered frame on it."""
        with self._changed:
            reason = PushFailure.CLOSED if self._closed else reason
            connection.is_up = False
            pushes = dict.fromkeys(connection.waiting.values())
            connection.waiting.clear()
            ended = []
            for pending in pushes:
                pending.failure = pending.failure or reason
                if self._sent.pop(pending.push.job, None) is not None:
                    ended.append(pending)
        connection.outbound.stream.shut()
        for pending in ended:
            self._end(pending)


def _retire(connection: _Connection) -> None:
    """Release a connection. Called by the sending thread only, so it never sends on a closed
    one."""
    connection.outbound.stream.shut()
    if connection.listener is not None:
        connection.listener.join(_JOIN_S)
    connection.outbound.close()
    connection.outbound.stream.close()


def _outcome(pending: _PendingPush) -> SenderEvent:
    if pending.failure is not None:
        return PushFailed(pending.push.job, pending.failure)
    return PushDone(pending.push.job, sum(piece.num_bytes for piece in pending.push.pieces))


def _frames(
    pieces: Sequence[BlockPiece], first_bytes: int, frame_bytes: int
) -> Iterator[Sequence[BlockPiece]]:
    """Split a push into frames, in order. Each is larger than the one before, up to the limit."""
    start = num_bytes = 0
    limit_bytes = min(first_bytes, frame_bytes)
    for end, piece in enumerate(pieces):
        too_large = num_bytes and num_bytes + piece.num_bytes > limit_bytes
        if too_large or end - start == MAX_PIECES:
            yield pieces[start:end]
            start, num_bytes = end, 0
            limit_bytes = min(2 * limit_bytes, frame_bytes)
        num_bytes += piece.num_bytes
    if pieces:
        yield pieces[start:]
