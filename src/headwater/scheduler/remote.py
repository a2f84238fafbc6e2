"""Sequences whose prompt is computed elsewhere, and sequences computed for somebody else.

    D   REMOTE ── invited ─▶ WAITING ── admitted ─▶ RECEIVING ── delivered ─▶ DECODE
          └────────────── computed here after all: WAITING ◀───────┘

A receiving sequence has slots for all its prompt, by the same admission as everybody, and
nothing of it is findable before it is delivered. Slots that bytes may still land in go to
nobody: they are quarantined until their link is quiet. On P a pin keeps the blocks of a
sequence, finished or not, while they are being sent.
"""

from collections.abc import Callable
from dataclasses import replace

from headwater.scheduler.blocks import BlockAllocator
from headwater.scheduler.output import SequenceOutput, TokenLogprobs, Usage
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.stats import Totals
from headwater.types import Slots

TakeIn = Callable[[Sequence, int, TokenLogprobs | None, float], SequenceOutput]
Finish = Callable[[Sequence, str, float], None]


class Handoffs:
    """What the scheduler does for hand-offs; decides nothing about the protocol."""

    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockAllocator,
        totals: Totals,
        take_in: TakeIn,
        finish: Finish,
        reschedule: Callable[[], None],
    ) -> None:
        """`reschedule` is called when somebody may start who could not before."""
        self._table = table
        self._blocks = blocks
        self._totals = totals
        self._take_in = take_in
        self._finish = finish
        self._reschedule = reschedule
        self.outputs: list[SequenceOutput] = []
        """Of sequences that went on or ended here, for the next step to hand out."""
        self.quarantined: dict[int, Slots] = {}
        """Slots that bytes may still land in, by lease."""

    @property
    def holds_back(self) -> bool:
        """Whether blocks will come back, or a sequence go on, although nothing is computed."""
        table = self._table
        pinned = any(sequence.num_pins for sequence in table.departing)
        return bool(table.receiving or self.quarantined) or pinned

    @property
    def wake_s(self) -> float | None:
        """When somebody stops waiting for what another sequence receives."""
        ends = [
            sequence.prefix_wait_until_s
            for sequence in self._table.waiting
            if sequence.prefix_source is not None and sequence.prefix_wait_until_s is not None
        ]
        return min(ends, default=None)

    def take_admitted(self) -> list[Sequence]:
        """Sequences of hand-offs that were admitted since the last call: on D they receive from
        now on, on P they are computed. Each is reported once."""
        return self._table.take_admitted()

    def take_computed(self) -> list[Sequence]:
        """Pinned sequences with more KV in their blocks than at the last call. Each is reported
        once, with its newest state."""
        return self._table.take_computed()

    def expect(self, sequence: Sequence) -> None:
        """A new sequence is computed elsewhere; it waits for that and for nothing here."""
        self._table.move(sequence, SequenceState.REMOTE)

    def invite(self, sequence: Sequence) -> None:
        """Find room for it, in its turn, so that it can be received."""
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
        """Its whole prompt is in its slots: commit it, and decode from `token` on.

        `usage` is what the prompt cost where it was computed, which is what its client is
        told; the counts of this instance are of its own tree.
        """
        if sequence.usage is not None:
            self._totals.count_admission(sequence.usage)
            sequence.usage = replace(usage, queued_s=sequence.usage.queued_s)
        sequence.receive(token)
        self._table.move(sequence, SequenceState.DECODE)
        self.outputs.append(self._take_in(sequence, token, logprobs, now))
        self._reschedule()

    def compute_here(self, sequence: Sequence, num_received: int, now: float) -> None:
        """Nobody else computes it. What landed whole is committed, and found when it starts."""
        sequence.receives = False
        if sequence.state is SequenceState.RECEIVING:
            if num_received:
                self._blocks.commit_received(sequence, num_received, now)
            self._blocks.release(sequence, now)
        if sequence.state is not SequenceState.WAITING:
            self._table.move(sequence, SequenceState.WAITING)
        self._reschedule()

    def decline(self, sequence: Sequence, reason: str, now: float) -> None:
        """End it unserved: somebody else is to try."""
        self.outputs.append(
            SequenceOutput(sequence.request_id, [], [], finish_reason="refused", detail=reason)
        )
        self._finish(sequence, "refused", now)

    def give_back(self, after_s: float, now: float) -> None:
        """End what was preempted and has waited `after_s` to resume, where somebody can have it
        continued elsewhere: its tokens so far are with whoever that is."""
        for sequence in self._table.waiting.preempted():
            if now - sequence.vacated_s >= after_s and sequence.request.can_return:
                name = sequence.request_id
                self.outputs.append(SequenceOutput(name, [], [], finish_reason="returned"))
                self._finish(sequence, "returned", now)

    def quarantine(self, sequence: Sequence, lease: int, now: float) -> None:
        """Take its slots away from it, and from everybody, until `free_quarantined`."""
        if len(held := self._blocks.detach(sequence, now)):
            self.quarantined[lease] = held

    def free_quarantined(self, lease: int) -> None:
        """Nothing more can land in those slots."""
        held = self.quarantined.pop(lease, None)
        if held is not None:
            self._blocks.free(held)
            self._reschedule()

    def pin(self, sequence: Sequence) -> None:
        """Keep its blocks, even when it has finished, until `unpin`."""
        sequence.num_pins += 1

    def unpin(self, sequence: Sequence, now: float) -> None:
        """Nothing reads its blocks from outside any more."""
        sequence.num_pins -= 1
        if sequence in self._table.departing and not sequence.is_kept:
            self._table.departing.remove(sequence)
            self._blocks.release(sequence, now)
            self._reschedule()
