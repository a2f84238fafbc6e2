"""Sequences whose prompt another instance computes, and sequences computed for another instance.

    D   REMOTE ── invited ─▶ WAITING ── admitted ─▶ RECEIVING ── delivered ─▶ DECODE
          └────────────── computed here after all: WAITING ◀───────┘

A receiving sequence has slots for all its prompt, by the same admission as every sequence, and
none of its blocks is findable before it is delivered. Slots that a peer may still write to are
quarantined until their link has stopped writing. On the prefill side a pin keeps the blocks of a
sequence, finished or not, while they are being sent.
"""

from collections.abc import Callable
from dataclasses import replace

from headwater.scheduler.blocks import BlockAllocator
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.request import SequenceOutput, TokenLogprobs, Usage
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.stats import Totals
from headwater.types import Slots

ApplyToken = Callable[[Sequence, int, TokenLogprobs | None, float], SequenceOutput]
Finish = Callable[[Sequence, str, float], None]


class Handoffs:
    """The scheduler's part of hand-offs; it decides nothing about the protocol."""

    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockAllocator,
        totals: Totals,
        apply_token: ApplyToken,
        finish: Finish,
        reschedule: Callable[[], None],
    ) -> None:
        """`reschedule` is called when a sequence may start that could not before."""
        self._table = table
        self._blocks = blocks
        self._totals = totals
        self._apply_token = apply_token
        self._finish = finish
        self._reschedule = reschedule
        self.outputs: list[SequenceOutput] = []
        """Outputs of delivered, declined and returned sequences; the next step returns them."""
        self.quarantined: dict[int, Slots] = {}
        """Slots that a peer may still write to, by lease."""

    @property
    def holds_back(self) -> bool:
        """Whether blocks will be freed, or a sequence will continue, without a step."""
        table = self._table
        pinned = any(sequence.num_pins for sequence in table.departing)
        return bool(table.receiving or self.quarantined) or pinned

    def take_admitted(self) -> list[Sequence]:
        """Sequences of hand-offs that were admitted since the last call: on D they receive from
        now on, on P they are computed. Each is reported once."""
        return self._table.take_admitted()

    def take_computed(self) -> list[Sequence]:
        """Pinned sequences with more KV in their blocks than at the last call. Each is reported
        once, with its newest state."""
        return self._table.take_computed()

    def expect(self, sequence: Sequence) -> None:
        """Add a sequence whose prompt another instance computes. It takes no slots before
        `invite`."""
        self._table.move(sequence, SequenceState.REMOTE)

    def invite(self, sequence: Sequence) -> None:
        """Queue `sequence` for admission, so that it gets slots to receive its prompt."""
        sequence.receives = True
        self._table.move(sequence, SequenceState.WAITING)
        self._table.invited[sequence.request_id] = sequence
        self._reschedule()

    def deliver(
        self,
        sequence: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        usage: Usage,
        now: float,
    ) -> None:
        """The whole prompt of `sequence` is in its slots: commit it, and decode from `token`
        on.

        `usage` is the prompt usage of the instance that computed it, and is reported to the
        client. The statistics of this instance count its own cache.
        """
        if sequence.usage is not None:
            self._totals.count_admission(sequence.usage)
            sequence.usage = replace(usage, queued_s=sequence.usage.queued_s)
        sequence.receive(token)
        self._table.move(sequence, SequenceState.DECODE)
        self.outputs.append(self._apply_token(sequence, token, logprobs, now))
        self._reschedule()

    def compute_here(self, sequence: Sequence, num_received: int, now: float) -> None:
        """Compute `sequence` here after all. Blocks received completely are committed, and
        matched when it starts."""
        sequence.receives = False
        if sequence.state is SequenceState.RECEIVING:
            if num_received:
                self._blocks.commit_received(sequence, num_received, now)
            self._blocks.release(sequence, now)
        if sequence.state is not SequenceState.WAITING:
            self._table.move(sequence, SequenceState.WAITING)
        self._reschedule()

    def decline(self, sequence: Sequence, reason: str, now: float) -> None:
        """End `sequence` with finish reason `refused`, so that another instance is tried."""
        self.outputs.append(
            SequenceOutput(sequence.request_id, [], [], finish_reason="refused", detail=reason)
        )
        self._finish(sequence, "refused", now)

    def give_back(self, after_s: float, now: float) -> None:
        """End preempted sequences that have waited `after_s` to resume, if the caller can
        continue them on another instance. The caller has their tokens so far."""
        for sequence in self._table.waiting.preempted():
            if now - sequence.preempted_s >= after_s and sequence.request.can_return:
                name = sequence.request_id
                self.outputs.append(SequenceOutput(name, [], [], finish_reason="returned"))
                self._finish(sequence, "returned", now)

    def quarantine(self, sequence: Sequence, lease: int, now: float) -> None:
        """Take the slots of `sequence` away, and let no sequence use them until
        `free_quarantined`."""
        if len(held := self._blocks.detach(sequence, now)):
            self.quarantined[lease] = held

    def free_quarantined(self, lease: int) -> None:
        """Free the slots of `lease`: the peer can no longer write to them."""
        held = self.quarantined.pop(lease, None)
        if held is not None:
            self._blocks.free(held)
            self._reschedule()

    def pin(self, sequence: Sequence) -> None:
        """Keep the blocks of `sequence`, even when it has finished, until `unpin`."""
        sequence.num_pins += 1

    def unpin(self, sequence: Sequence, now: float) -> None:
        """Undo one `pin`: a hand-off no longer reads the blocks of `sequence`."""
        sequence.num_pins -= 1
        if sequence in self._table.departing and not sequence.is_kept:
            self._table.departing.remove(sequence)
            self._blocks.release(sequence, now)
            self._reschedule()
