"""Sends device blocks: copies them into staging buffers, and pushes the buffers.

    push ── split into parts ──▶ copied into buffers, two at a time ──▶ pushed by the link ──▶ outcome
                                            └── while the parts before are being sent

Each sender has its own buffers, so a stalled peer does not delay the others. One thread starts
the copies and checks the deadlines of parts that wait. The copier's threads push the parts that
have been copied, in order.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from threading import Condition, Lock, Thread
from typing import NamedTuple
from weakref import WeakMethod

from headwater.clock import Clock
from headwater.disagg.links.interface import Deliver, Sender
from headwater.disagg.links.staging.buffers import Buffers
from headwater.disagg.protocol.push import (
    BlockPiece,
    LinkEvent,
    Push,
    PushDone,
    PushFailed,
    PushFailure,
    SenderEvent,
)

_CLOSE_S = 10.0
_MAX_COPYING = 2
"""Parts that are copied from the device at once, so that the device has the next part when it
finishes one."""

Connect = Callable[[Deliver], Sender]
"""Makes a sender that pushes from the buffers."""


class _PendingPush:
    """A push without an outcome."""

    def __init__(self, push: Push) -> None:
        self.push = push
        self.deadline_s = push.deadline_s
        self.num_left = 0
        """Parts that have not ended."""

        self.has_begun = False
        self.has_ended = False
        self.failure: PushFailure | None = None

    @property
    def outcome(self) -> SenderEvent:
        """Outcome of a push that has ended."""
        if self.failure is not None:
            return PushFailed(self.push.job, self.failure)
        return PushDone(self.push.job, sum(piece.num_bytes for piece in self.push.pieces))


class _Part(NamedTuple):
    """Blocks of a push that are copied and sent together."""

    pending: _PendingPush
    pieces: Sequence[BlockPiece]


class _Load:
    """A part that is copied into buffers."""

    def __init__(self, part: _Part, buffers: list[int]) -> None:
        self.part = part
        self.buffers = buffers
        self.is_there: bool | None = None
        """Whether the copy succeeded; None until it has ended."""


class StagedSender:
    """A `Sender` of device slots."""

    def __init__(
        self,
        connect: Connect,
        buffers: Buffers,
        deliver: Deliver,
        clock: Clock,
        *,
        part_blocks: int,
    ) -> None:
        """At most `part_blocks` blocks are copied together."""
        self._buffers = buffers
        self._deliver = deliver
        self._clock = clock
        self._part_blocks = part_blocks
        self._changed = Condition()
        self._queue: deque[_Part] = deque()
        self._copying: deque[_Load] = deque()
        """Parts that are being copied, or wait for the one before them to be pushed."""

        self._in_order = Lock()
        """Held while copied parts are pushed, so that no part overtakes another one."""

        self._travelling: dict[int, tuple[_Part, list[int]]] = {}
        """Parts that the link is pushing, with their buffers, by the link's job."""

        self._jobs = count()
        self._pending: set[_PendingPush] = set()
        """Pushes whose outcome has not been delivered."""

        self._closed = False
        # The link holds only a weak reference. So the buffers are freed when this sender is
        # closed, and not by the garbage collector, which the engine seldom runs.
        self._sender = connect(partial(_tell, WeakMethod(self._take)))
        Thread(target=self._run, name="staged-send", daemon=True).start()

    def push(self, push: Push) -> None:
        pending = _PendingPush(push)
        parts = [_Part(pending, pieces) for pieces in self._cut(push.pieces)]
        with self._changed:
            self._pending.add(pending)
            closed = self._closed
            if not closed:
                pending.num_left = len(parts)
                self._queue.extend(parts)
                self._changed.notify_all()
        self._settle(pending, PushFailure.CLOSED if closed else None)

    def extend(self, lease: int, deadline_s: float) -> None:
        with self._changed:
            for pending in self._pending:
                if pending.push.lease == lease:
                    pending.deadline_s = max(pending.deadline_s, deadline_s)
        self._sender.extend(lease, deadline_s)

    def cancel(self, lease: int) -> None:
        with self._changed:
            waiting = dict.fromkeys(part.pending for part in self._queue)
            given_up = [f for f in waiting if f.push.lease == lease and not f.has_begun]
        for pending in given_up:
            self._settle(pending, PushFailure.CANCELLED)
        self._sender.cancel(lease)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            waiting = dict.fromkeys(part.pending for part in self._queue)
        for pending in waiting:
            self._settle(pending, PushFailure.CLOSED)
        self._sender.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._pending, _CLOSE_S)
        self._buffers.close()

    def _cut(self, pieces: Sequence[BlockPiece]) -> Iterator[Sequence[BlockPiece]]:
        for start in range(0, len(pieces), self._part_blocks):
            yield pieces[start : start + self._part_blocks]

    def _run(self) -> None:
        while (load := self._next()) is not None:
            slots = [piece.slot for piece in load.part.pieces]
            self._buffers.load(slots, load.buffers, partial(self._loaded, load))

    def _next(self) -> _Load | None:
        """The next part to copy, with its buffers; waits for them and checks deadlines. None
        after `close`."""
        while True:
            self._expire()
            with self._changed:
                if self._closed:
                    return None
                if self._queue and len(self._copying) < _MAX_COPYING:
                    buffers = self._buffers.take(len(self._queue[0].pieces))
                    if buffers is not None:
                        part = self._queue.popleft()
                        part.pending.has_begun = True
                        self._copying.append(_Load(part, buffers))
                        return self._copying[-1]
                self._changed.wait(self._wait_s())

    def _wait_s(self) -> float | None:
        """Time until the first deadline of a part that waits."""
        if not self._queue:
            return None
        first = min(part.pending.deadline_s for part in self._queue)
        # A millisecond more, so that the deadline has passed when this thread wakes.
        return max(first - self._clock.now(), 0.0) + 1e-3

    def _expire(self) -> None:
        """Fail pushes whose deadline has passed before a part of them began."""
        now = self._clock.now()
        with self._changed:
            waiting = dict.fromkeys(part.pending for part in self._queue)
        for pending in waiting:
            if pending.deadline_s <= now:
                self._settle(pending, PushFailure.TIMEOUT)

    def _loaded(self, load: _Load, is_there: bool) -> None:
        """A copy has ended, so the device slots are not read any more: push the parts that are
        next in order."""
        with self._changed:
            load.is_there = is_there
        failed = []
        with self._in_order:
            while (first := self._first_loaded()) is not None:
                failure = self._push_loaded(first)
                if failure is not None:
                    failed.append((first, failure))
                with self._changed:
                    self._copying.popleft()
                    self._changed.notify_all()
        for ended, failure in failed:
            self._end(ended.part, ended.buffers, failure)

    def _first_loaded(self) -> _Load | None:
        """The oldest part, if its copy has ended."""
        with self._changed:
            first = self._copying[0] if self._copying else None
            return None if first is None or first.is_there is None else first

    def _push_loaded(self, load: _Load) -> PushFailure | None:
        """Push a copied part; returns the reason if it is not pushed."""
        with self._changed:
            failure = self._obstacle(load)
            job = next(self._jobs)
            if failure is None:
                self._travelling[job] = load.part, load.buffers
        if failure is None:
            # After the part is in the table: its outcome may come from another thread at once.
            push = _from_buffers(job, load.part, load.buffers)
            self._sender.push(push)
            # The lease may have been extended after the push was created and before it was
            # started.
            self._sender.extend(push.lease, load.part.pending.deadline_s)
        return failure

    def _obstacle(self, load: _Load) -> PushFailure | None:
        """Why a copied part is not pushed; None if it is."""
        pending = load.part.pending
        if pending.failure is not None:
            return pending.failure
        if self._closed:
            return PushFailure.CLOSED
        if self._clock.now() >= pending.deadline_s:
            return PushFailure.TIMEOUT
        return None if load.is_there else PushFailure.LOST

    def _take(self, event: LinkEvent) -> None:
        """Process an outcome of the link for a part."""
        assert isinstance(event, PushDone | PushFailed)
        with self._changed:
            part, buffers = self._travelling.pop(event.job)
        self._end(part, buffers, event.reason if isinstance(event, PushFailed) else None)

    def _end(self, part: _Part, buffers: list[int], failure: PushFailure | None) -> None:
        with self._changed:
            self._buffers.give_back(buffers)
            self._changed.notify_all()
        self._settle(part.pending, failure, num_ended=1)

    def _settle(
        self, pending: _PendingPush, failure: PushFailure | None, *, num_ended: int = 0
    ) -> None:
        """Count `num_ended` parts of a push as ended. After a failure no further part begins.
        When no part remains, exactly one thread delivers the outcome."""
        with self._changed:
            if pending.has_ended:
                return
            pending.num_left -= num_ended
            pending.failure = pending.failure or failure
            if pending.failure is not None:
                kept = [part for part in self._queue if part.pending is not pending]
                pending.num_left -= len(self._queue) - len(kept)
                self._queue = deque(kept)
            if pending.num_left:
                return
            pending.has_ended = True
        self._deliver(pending.outcome)
        with self._changed:
            self._pending.discard(pending)
            self._changed.notify_all()


def _tell(take: "WeakMethod[Deliver]", event: LinkEvent) -> None:
    if (told := take()) is not None:
        told(event)


def _from_buffers(job: int, part: _Part, buffers: list[int]) -> Push:
    """The push of the same blocks from their buffers."""
    push = part.pending.push
    pieces = tuple(
        BlockPiece(buffer, piece.index, piece.num_bytes)
        for buffer, piece in zip(buffers, part.pieces, strict=True)
    )
    return Push(job=job, lease=push.lease, pieces=pieces, deadline_s=part.pending.deadline_s)
