"""Computing a first chunk while the KV it reads is still being loaded, layer by layer.

    step n      | load starts | layer 0 arrives, is computed | layer 1 …     the first chunk
    later       | load done: the chunk counts | or failed: the chunk is discarded

The sequence has a lease on what the device had, the target slots of the load in its block table,
and slots of its own behind them. It is given one chunk. Until the load is done, nothing of that
chunk is emitted or committed, and no further step has a row of the sequence. The outcome is
applied only when no step in flight reads the target slots. A failed load sends the sequence back
to the waiting queue, as if it had not started.
"""

from collections.abc import Callable, Iterable
from itertools import chain

from headwater.cache import JobOutcome, JobStatus
from headwater.scheduler.blocks import BlockAllocator
from headwater.scheduler.output import SequenceOutput, TokenLogprobs
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.stats import Totals

TakeIn = Callable[[Sequence, int, TokenLogprobs | None, float], SequenceOutput]
"""Takes in a token whose KV counts, and says what came of it."""


class OverlappedLoads:
    """Confirms or rewinds a riding sequence when its promotion has ended."""

    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockAllocator,
        totals: Totals,
        take_in: TakeIn,
    ) -> None:
        self._table = table
        self._blocks = blocks
        self._totals = totals
        self._take_in = take_in

    def defer(self, outcome: JobOutcome) -> bool:
        """Whether a step in flight reads what this job moves: its end is kept for later."""
        sequence = self._find(outcome, chain(self._table.overlapping, self._table.departing))
        if sequence is None or sequence.overlap is None or not sequence.num_in_flight:
            return False
        sequence.overlap.outcomes.append(outcome)
        return True

    def collect(
        self,
        sequence: Sequence,
        num_tokens: int,
        token: int | None,
        chosen: TokenLogprobs | None,
    ) -> list[JobOutcome]:
        """The chunk was computed; the ends of its promotion that had to wait for that."""
        overlap = sequence.overlap
        assert overlap is not None, "a riding sequence has a ride"
        sequence.num_in_flight -= 1
        overlap.hold(num_tokens, token, chosen)
        return overlap.outcomes

    def finish_job(self, outcome: JobOutcome, now: float) -> list[SequenceOutput]:
        """A job has landed in the cache. Whoever rode on it goes on, or starts over; the output
        that was held back until now, if there is one."""
        sequence = self._find(outcome, self._table.overlapping)
        if sequence is None or sequence.overlap is None:
            return []
        overlap = sequence.overlap
        if outcome.ending is not JobStatus.DONE or not self._blocks.confirm(sequence, now):
            self._blocks.release(sequence, now)
            self._table.move(sequence, SequenceState.WAITING)
            return []
        is_first = not sequence.num_preemptions and not sequence.is_counted
        if is_first:
            match = self._blocks.match(sequence)
            sequence.usage = self._blocks.usage(sequence, match, now)
            self._totals.count_admission(sequence.usage)
        sequence.is_counted = True
        sequence.num_computed += overlap.num_tokens
        self._table.note_computed(sequence)
        if overlap.token is None:
            self._table.move(sequence, SequenceState.PREFILL)
            if sequence.num_computed >= sequence.commit_at:
                self._blocks.commit(sequence, now)
            return []
        self._table.move(sequence, SequenceState.DECODE)
        sequence.append(overlap.token)
        return [self._take_in(sequence, overlap.token, overlap.logprobs, now)]

    def _find(self, outcome: JobOutcome, sequences: Iterable[Sequence]) -> Sequence | None:
        for sequence in sequences:
            if sequence.overlap is not None and sequence.overlap.job == outcome.job:
                return sequence
        return None
