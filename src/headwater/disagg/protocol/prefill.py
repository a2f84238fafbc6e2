"""State machine of one hand-off on the prefill side (P).

Pure: messages, deadlines and the scheduler's progress in, actions out; `now` is passed in.

    begin ─▶ queued ── admitted ─▶ asked ── Grant ─▶ pushing ── token ─▶ First ── Done ─▶ over
                └──────── Cancel · Refuse · lost · push failed · lease over ───────────────┘

P stops writing before D reuses a slot. P counts the lease term from the moment it *sent* the
last heartbeat that D confirmed, less a margin. D counts it from the later moment at which that
heartbeat arrived. So P's lease always ends first, and no two clocks are compared.
"""

from collections.abc import Callable

from headwater.disagg.protocol.actions import (
    CancelPushes,
    ExtendPushes,
    PrefillAction,
    PushBlocks,
    Release,
    Send,
    Withdraw,
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
    Pulled,
    Reason,
    Refuse,
    Renew,
    Renewed,
    Start,
    Timings,
    ToPrefill,
)
from headwater.disagg.protocol.push import BlockPiece, Push
from headwater.scheduler.request import TokenLogprobs, Usage
from headwater.types import EMPTY, Slots

Actions = list[PrefillAction]

_NEVER = float("inf")


class PrefillHandoff:
    """One request that is prefilled here for a peer. It ends exactly once."""

    def __init__(
        self,
        start: Start,
        config: HandoffConfig,
        *,
        block_tokens: int,
        block_bytes: int,
        new_job: Callable[[], int],
    ) -> None:
        self.start = start
        self.handoff = start.handoff
        self.outcome: Reason | None = None
        """Why it failed; None if it succeeded or has not ended."""
        self.is_over = False
        self.num_bytes = 0
        """Bytes pushed and confirmed."""
        self._config = config
        self._num_tokens = len(start.request.tokens)
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._new_job = new_job
        self._grant: Grant | None = None
        self._first: First | None = None
        self._pushing: dict[int, int] = {}
        self._num_computed = 0
        self._table: Slots = EMPTY
        self._next_block = 0
        self._is_admitted = False
        self._began_s = self._admitted_s = self._ask_s = 0.0
        self._ready_s = _NEVER
        """Time since which a block has been ready to be sent."""
        self._valid_s = self._end_s = _NEVER
        self._renew_at_s = self._ask_at_s = self._first_at_s = _NEVER

    @property
    def is_released(self) -> bool:
        """Whether it is over and no push reads its blocks."""
        return self.is_over and not self._pushing

    @property
    def wake_s(self) -> float:
        """When `tick` has something to do."""
        if self.is_over:
            return _NEVER
        return min(
            self._valid_s, self._end_s, self._renew_at_s, self._ask_at_s, self._first_at_s
        )

    def begin(self, now: float) -> Actions:
        """Accept the request: it waits in the scheduler's queue, and D receives heartbeats."""
        config = self._config
        self._began_s = now
        self._valid_s = now + config.term_s - config.margin_s
        self._end_s = now + self.start.within_s
        self._renew_at_s = now + config.renew_s
        return [Send(Accepted(self.handoff, now))]

    def receive(self, message: ToPrefill, now: float) -> Actions:
        """Process a message of D. Repeated and late messages change nothing."""
        if self.is_over:
            # A late grant holds slots on D: return it at once.
            late = isinstance(message, Grant)
            return [Send(Failed(self.handoff, self.outcome or Reason.GONE))] if late else []
        match message:
            case Start():
                return [Send(Accepted(self.handoff, now))]
            case Grant():
                return self._granted(message, now)
            case Renewed(sent_s=sent_s):
                return self._renewed(sent_s, now)
            case HandoffDone():
                return self._end(None)
            case Refuse(reason=reason) | Cancel(reason=reason):
                return self._end(reason)
            case Pulled():
                return []

    def admitted(self, now: float) -> Actions:
        """The scheduler began to compute the request: ask D where its blocks go."""
        if self.is_over or self._is_admitted:
            return []
        self._is_admitted = True
        self._admitted_s = now
        self._ask_at_s = now + self._config.resend_s
        return [Send(Ask(self.handoff))]

    def computed(self, num_tokens: int, table: Slots, now: float) -> Actions:
        """The KV of `num_tokens` is in the blocks of `table`: push the full blocks."""
        self._num_computed, self._table = num_tokens, table
        return self._push(now)

    def first_token(
        self, token: int, logprobs: TokenLogprobs | None, usage: Usage, now: float
    ) -> Actions:
        """The prompt is computed and this is its first token: push the partial last block, too."""
        if self.is_over:
            return []
        self._first = First(
            handoff=self.handoff,
            token=token,
            logprobs=logprobs,
            usage=usage,
            num_blocks=0,
            num_bytes=0,
            timings=Timings(
                queue_s=self._admitted_s - self._began_s, compute_s=now - self._admitted_s
            ),
        )
        return self._push(now)

    def pushed(self, job: int, num_bytes: int, now: float) -> Actions:
        """Count the bytes of a push that succeeded."""
        if self._pushing.pop(job, None) is None:
            return []
        self.num_bytes += num_bytes
        return [Release()] if self.is_released else []

    def push_failed(self, job: int, now: float) -> Actions:
        """A push failed: tell D at once."""
        if self._pushing.pop(job, None) is None:
            return []
        if self.is_over:
            return [Release()] if self.is_released else []
        return self._end(Reason.PUSH, tell=True)

    def dropped(self, now: float) -> Actions:
        """End the hand-off: the scheduler ended the request."""
        return [] if self.is_over else self._end(Reason.ABORTED, tell=True)

    def lost(self, now: float) -> Actions:
        """End the hand-off: the connection to D ended."""
        return [] if self.is_over else self._end(Reason.LOST)

    def tick(self, now: float) -> Actions:
        """If a deadline has passed, send a heartbeat, send a message again, or end."""
        if self.is_over:
            return []
        if now >= self._valid_s:
            return self._end(Reason.EXPIRED, tell=True)
        if now >= self._end_s:
            return self._end(Reason.TIMEOUT, tell=True)
        actions: Actions = []
        config = self._config
        if now >= self._renew_at_s:
            self._renew_at_s = now + config.renew_s
            actions.append(Send(Renew(self.handoff, now)))
        if now >= self._ask_at_s:
            self._ask_at_s = now + config.resend_s
            actions.append(Send(Ask(self.handoff)))
        if now >= self._first_at_s and self._first is not None:
            self._first_at_s = now + config.resend_s
            actions.append(Send(self._first))
        return actions

    def _renewed(self, sent_s: float, now: float) -> Actions:
        """D confirmed the heartbeat sent at `sent_s`: pushes in flight may take longer."""
        valid_s = sent_s + self._config.term_s - self._config.margin_s
        if sent_s > now or valid_s <= self._valid_s:
            return []
        self._valid_s = valid_s
        return [ExtendPushes(valid_s)] if self._pushing else []

    def _granted(self, grant: Grant, now: float) -> Actions:
        if self._grant is not None:
            return []
        num_blocks = -(-self._num_tokens // self._block_tokens)
        if not 0 <= grant.start_block <= num_blocks or (
            grant.start_block + grant.num_blocks != num_blocks
        ):
            return self._end(Reason.INVALID, tell=True)
        self._grant = grant
        self._ask_s = max(now - self._ready_s, 0.0)
        self._ask_at_s = _NEVER
        self._next_block = grant.start_block
        return self._push(now)

    def _push(self, now: float) -> Actions:
        """Push full blocks that were not pushed yet; after the last one, send the first token."""
        grant = self._grant
        whole = self._num_computed // self._block_tokens
        if whole or self._first is not None:
            self._ready_s = min(self._ready_s, now)
        if self.is_over or grant is None or now >= self._valid_s:
            return []
        last = grant.start_block + grant.num_blocks
        end = last if self._first is not None else min(whole, last)
        actions: Actions = []
        if self._next_block < end:
            actions.append(PushBlocks(self._next_push(grant, end)))
        if self._first is not None and self._first_at_s == _NEVER:
            self._first_at_s = now + self._config.resend_s
            self._first = self._with_byte_count(self._first, grant)
            actions.append(Send(self._first))
        return actions

    def _next_push(self, grant: Grant, end: int) -> Push:
        job = self._new_job()
        first, self._next_block = self._next_block, end
        self._pushing[job] = end - first
        slots = self._table[first:end].tolist()
        return Push(
            job=job,
            lease=self.handoff,
            pieces=tuple(
                BlockPiece(slot, first + at - grant.start_block, self._block_bytes)
                for at, slot in enumerate(slots)
            ),
            deadline_s=self._valid_s,
        )

    def _with_byte_count(self, first: First, grant: Grant) -> First:
        timings = first.timings
        return First(
            handoff=first.handoff,
            token=first.token,
            logprobs=first.logprobs,
            usage=first.usage,
            num_blocks=grant.num_blocks,
            num_bytes=grant.num_blocks * self._block_bytes,
            timings=Timings(
                queue_s=timings.queue_s,
                ask_s=self._ask_s,
                compute_s=timings.compute_s,
            ),
        )

    def _end(self, reason: Reason | None, *, tell: bool = False) -> Actions:
        """End the hand-off. Blocks stay pinned while a push reads them."""
        self.is_over = True
        self.outcome = reason
        actions: Actions = []
        if tell:
            actions.append(Send(Failed(self.handoff, reason or Reason.GONE)))
        if self._pushing:
            actions.append(CancelPushes())
        actions.append(Withdraw())
        if not self._pushing:
            actions.append(Release())
        return actions
