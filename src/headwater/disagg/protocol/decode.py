"""State machine of one hand-off on the decode side (D).

Pure: messages, deadlines and events in, actions out; `now` is passed in.

    begin ─▶ STARTING ── Accepted ─▶ QUEUED ── Ask ─▶ RESERVING ── slots ─▶ RECEIVING
                │                      │                  │                     │ First, all blocks
             decline              local fallback       decline              CLOSING ── closed ─▶ deliver
                                                                                │ any failure
                                                                            FAILING ── closed ─▶ local fallback

Slots are delivered, freed or reused only after the link has closed the lease. Until then the
peer could still write to them, so they stay quarantined.
"""

from collections.abc import Sequence
from enum import Enum, auto

from headwater.disagg.protocol.actions import (
    Decline,
    DecodeAction,
    DeliverFirstToken,
    Fence,
    FreeQuarantined,
    LocalFallback,
    OpenLease,
    Quarantine,
    Reserve,
    Send,
)
from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.messages import (
    Accepted,
    Ask,
    Cancel,
    Failed,
    First,
    Grant,
    HandoffDone,
    Pull,
    Reason,
    Refuse,
    Renew,
    Renewed,
    Start,
    StartRefused,
    ToDecode,
)


class ReceiveTracker:
    """Which blocks [0, num_blocks) of a lease have been received, and whether all have. Pure."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * block_bytes
        """Bytes expected in total."""
        self._block_bytes = block_bytes
        self._received: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every block has been received."""
        return self.num_received == self.num_blocks

    @property
    def num_received(self) -> int:
        """Number of blocks received."""
        return len(self._received)

    def add(self, index: int, num_bytes: int) -> None:
        """Note a received block. A short one, or one outside the lease, does not count."""
        if num_bytes == self._block_bytes and 0 <= index < self.num_blocks:
            self._received.add(index)

    def is_exact(self, num_bytes: int, blocks: frozenset[int]) -> bool:
        """Whether the link's final byte count and blocks are exactly the expected ones."""
        return num_bytes == self.num_bytes and blocks == frozenset(range(self.num_blocks))

    def num_leading(self, blocks: frozenset[int]) -> int:
        """Number of complete blocks before the first one that is missing."""
        whole = blocks & self._received
        return next((at for at in range(self.num_blocks) if at not in whole), self.num_blocks)


Actions = list[DecodeAction]

_NEVER = float("inf")


class DecodeState(Enum):
    """Progress of a hand-off, seen from D."""

    STARTING = auto()
    QUEUED = auto()
    RESERVING = auto()
    RECEIVING = auto()
    CLOSING = auto()
    FAILING = auto()
    OVER = auto()


class DecodeHandoff:
    """One request whose prompt a peer computes. It ends exactly once."""

    def __init__(
        self, start: Start, config: HandoffConfig, *, block_bytes: int, local_fallback: bool
    ) -> None:
        """After a refusal, `local_fallback` decides: compute the prompt here, or decline the
        request."""
        self.start = start
        self.handoff = start.handoff
        self.state = DecodeState.STARTING
        self.outcome: Reason | None = None
        """Why it failed; None if it succeeded or has not ended."""
        self.num_bytes = 0
        """Bytes received, by the link's final count."""
        self.began_s = self.accepted_s = self.first_s = self.ended_s = 0.0
        self.first: First | None = None
        self._config = config
        self._block_bytes = block_bytes
        self._local_fallback = local_fallback
        self._grant: Grant | None = None
        self._tracker: ReceiveTracker | None = None
        self._is_fenced = self._lease_is_closed = False
        self._is_quarantined = False
        self._expires_s = self._end_s = _NEVER
        self._resend_at_s = self._reserve_end_s = self._fence_end_s = _NEVER

    @property
    def is_over(self) -> bool:
        return self.state is DecodeState.OVER

    @property
    def is_released(self) -> bool:
        """Whether it is over and no slot of it is quarantined."""
        return self.is_over and not self._is_quarantined

    @property
    def lease_end_s(self) -> float | None:
        """When P's lease ends unless it is renewed; None if P has no lease."""
        return self._expires_s if self.state is DecodeState.RECEIVING else None

    @property
    def wake_s(self) -> float:
        """When `tick` has something to do."""
        if self.is_over:
            return _NEVER
        if self.state in (DecodeState.CLOSING, DecodeState.FAILING):
            # In these states only the end of the fence is awaited. Other deadlines may have
            # passed: if one were returned here, the loop would not sleep before that end.
            return self._fence_end_s
        return min(
            self._expires_s,
            self._end_s,
            self._resend_at_s,
            self._reserve_end_s,
            self._fence_end_s,
        )

    def begin(self, now: float) -> Actions:
        """Ask P to compute the prompt."""
        config = self._config
        self.began_s = now
        self._expires_s = now + config.start_timeout_s
        self._end_s = now + config.handoff_timeout_s
        self._resend_at_s = now + config.resend_s
        return [Send(self.start)]

    def receive(self, message: ToDecode, now: float) -> Actions:
        """Process a message of P. Repeated and late messages change nothing."""
        if self.is_over:
            return self._answer_late(message)
        match message:
            case Accepted(sent_s=sent_s) | Renew(sent_s=sent_s):
                self._heartbeat(now)
                return [Send(Renewed(self.handoff, sent_s))]
            case Ask():
                return self._asked(now)
            case First():
                return self._take_first(message, now)
            case StartRefused(reason=reason):
                return self._refused(reason, now)
            case Failed(reason=reason):
                return self._fail(reason, now, tell=False)
            case Pull():
                return []

    def reserved(self, start_block: int, slots: Sequence[int], now: float) -> Actions:
        """The scheduler found room: grant P the blocks from `start_block` on, which go to
        `slots`."""
        if self.state is not DecodeState.RESERVING:
            return []
        self.state = DecodeState.RECEIVING
        self._reserve_end_s = _NEVER
        self._tracker = ReceiveTracker(len(slots), self._block_bytes)
        self._grant = Grant(
            handoff=self.handoff,
            start_block=start_block,
            num_blocks=len(slots),
            term_s=self._config.term_s,
        )
        actions: Actions = []
        if slots:
            actions.append(OpenLease(slots))
        else:
            self._lease_is_closed = True  # no block is expected, so there is nothing to fence
        return [*actions, Send(self._grant)]

    def block_received(self, index: int, num_bytes: int, now: float) -> Actions:
        """Count a block that the link wrote to its slot."""
        if self._tracker is None:
            return []
        self._tracker.add(index, num_bytes)
        return self._close_if_complete(now)

    def lease_closed(self, num_bytes: int, blocks: frozenset[int], now: float) -> Actions:
        """The link writes nothing more to the slots, and reports what it received: deliver the
        prompt, compute the missing blocks, or free quarantined slots."""
        if self._tracker is None or self._lease_is_closed:
            return []
        self._lease_is_closed = True
        if self._is_quarantined:
            self._is_quarantined = False
            return [FreeQuarantined()]
        if self.state is DecodeState.CLOSING:
            return self._settle(num_bytes, blocks, now)
        if (
            self.state is DecodeState.RECEIVING
        ):  # closed without a fence: the receiver could not store a block that had arrived
            return self._recompute(blocks, now)
        if self.state is not DecodeState.FAILING:
            return []
        leading = self._tracker.num_leading(blocks)
        return self._over(now, [LocalFallback(leading, self.outcome or Reason.GONE)])

    def lost(self, reason: Reason, now: float) -> Actions:
        """End the hand-off: the connection to P ended or could not be made."""
        if self.state is DecodeState.STARTING:
            return self._decline(reason, now)
        return self._fail(Reason.LOST, now, tell=False)

    def abort(self, now: float) -> Actions:
        """End the hand-off of an aborted request. Slots that P may still write to stay
        quarantined."""
        if self.is_over:
            return []
        actions: Actions = [Send(Cancel(self.handoff, Reason.ABORTED))]
        if self._tracker is not None and not self._lease_is_closed:
            self._is_quarantined = True
            actions += [*self._fence(now), Quarantine()]
        self.outcome = Reason.ABORTED
        return self._over(now, actions)

    def tick(self, now: float) -> Actions:
        """If a deadline has passed, send again or fail."""
        if self.is_over:
            return []
        if now >= self._fence_end_s:
            self._is_quarantined = True
            reason = self.outcome or Reason.TIMEOUT
            return self._over(now, [Quarantine(), LocalFallback(0, reason)])
        if self.state in (DecodeState.CLOSING, DecodeState.FAILING):
            return []
        if now >= self._expires_s:
            if self.state is DecodeState.STARTING:
                return [
                    Send(Cancel(self.handoff, Reason.TIMEOUT)),
                    *self._decline(Reason.UNREACHABLE, now),
                ]
            return self._fail(Reason.EXPIRED, now, tell=True)
        if now >= self._end_s:
            return self._fail(Reason.TIMEOUT, now, tell=True)
        if now >= self._reserve_end_s:
            return [
                Send(Refuse(self.handoff, Reason.NO_ROOM)),
                *self._decline(Reason.NO_ROOM, now),
            ]
        if now >= self._resend_at_s:
            starting = self.state is DecodeState.STARTING
            self._resend_at_s = now + self._config.resend_s if starting else _NEVER
            return [Send(self.start)] if starting else []
        return []

    def _heartbeat(self, now: float) -> None:
        """P is alive: the lease is valid for a full term from now."""
        self._expires_s = now + self._config.term_s
        if self.state is DecodeState.STARTING:
            self.state = DecodeState.QUEUED
            self.accepted_s = now
            self._resend_at_s = _NEVER

    def _asked(self, now: float) -> Actions:
        """Reserve slots on the first Ask; repeat the Grant on further ones."""
        self._heartbeat(now)
        if self.state is DecodeState.QUEUED:
            self.state = DecodeState.RESERVING
            self._reserve_end_s = now + self._config.reserve_timeout_s
            return [Reserve()]
        return [] if self._grant is None else [Send(self._grant)]

    def _take_first(self, first: First, now: float) -> Actions:
        if self.state is not DecodeState.RECEIVING or self.first is not None:
            return []
        self._heartbeat(now)
        self.first = first
        self.first_s = now
        return self._close_if_complete(now)

    def _close_if_complete(self, now: float) -> Actions:
        """All blocks and the first token are here: fence, then compare the link's final byte
        count."""
        tracker = self._tracker
        if self.state is not DecodeState.RECEIVING or self.first is None or tracker is None:
            return []
        if not tracker.is_complete:
            return []
        self.state = DecodeState.CLOSING
        if self._lease_is_closed:
            return self._settle(0, frozenset(), now)
        return self._fence(now)

    def _settle(self, num_bytes: int, blocks: frozenset[int], now: float) -> Actions:
        """The lease is closed: deliver the prompt if the byte count is exact, else recompute."""
        assert self._tracker is not None, "closing follows receiving"
        assert self.first is not None, "closing follows the first token"
        self.num_bytes = num_bytes
        announced = (self.first.num_blocks, self.first.num_bytes)
        due = (self._tracker.num_blocks, self._tracker.num_bytes)
        if self._tracker.is_exact(num_bytes, blocks) and announced == due:
            return self._over(
                now, [DeliverFirstToken(self.first), Send(HandoffDone(self.handoff))]
            )
        return self._recompute(blocks, now)

    def _recompute(self, blocks: frozenset[int], now: float) -> Actions:
        """The byte count is wrong: keep the leading blocks that were received, compute the
        rest."""
        assert self._tracker is not None, "a byte count follows receiving"
        self.outcome = Reason.BYTE_COUNT
        leading = self._tracker.num_leading(blocks)
        return self._over(
            now,
            [
                Send(Cancel(self.handoff, Reason.BYTE_COUNT)),
                LocalFallback(leading, Reason.BYTE_COUNT),
            ],
        )

    def _refused(self, reason: Reason, now: float) -> Actions:
        if self.state in (DecodeState.STARTING, DecodeState.QUEUED):
            return self._decline(reason, now)
        return self._fail(reason, now, tell=False)

    def _decline(self, reason: Reason, now: float) -> Actions:
        """End a hand-off of which nothing was received: compute here, or let another instance
        try."""
        self.outcome = reason
        here = LocalFallback(0, reason) if self._local_fallback else Decline(reason)
        return self._over(now, [here])

    def _fail(self, reason: Reason, now: float, *, tell: bool) -> Actions:
        """P failed: fence the slots it may still write, then compute the missing blocks."""
        if self.state in (DecodeState.FAILING, DecodeState.CLOSING, DecodeState.OVER):
            return []
        self.outcome = reason
        actions: Actions = [Send(Cancel(self.handoff, reason))] if tell else []
        if self._tracker is None or self._lease_is_closed:
            return self._over(now, [*actions, LocalFallback(0, reason)])
        self.state = DecodeState.FAILING
        return [*actions, *self._fence(now)]

    def _fence(self, now: float) -> Actions:
        if self._is_fenced:
            return []
        self._is_fenced = True
        self._fence_end_s = now + self._config.fence_wait_s
        return [Fence()]

    def _over(self, now: float, actions: Actions) -> Actions:
        self.state = DecodeState.OVER
        self.ended_s = now
        return actions

    def _answer_late(self, message: ToDecode) -> Actions:
        """P does not know yet that the hand-off is over: tell P the outcome."""
        if isinstance(message, Failed | StartRefused | Pull):
            return []
        if self.outcome is None:
            return [Send(HandoffDone(self.handoff))]
        return [Send(Cancel(self.handoff, self.outcome))]
