"""Computing a first chunk while the KV it reads is still being loaded, layer by layer.

    step n      | load starts | layer 0 arrives, is computed | layer 1 …     the first chunk
    later       | load done: the chunk counts | or failed: the chunk is discarded

The sequence has a lease on what the device had, the target slots of the load in its block
table, and slots of its own behind them. It computes one chunk. Until the load has ended,
nothing of that chunk is emitted or committed, and no further step has a row of the sequence.
The outcome is applied only when no step in flight reads the target slots. A failed load sends
the sequence back to the waiting queue, as if it had not started.
"""

from collections.abc import Callable

from headwater.cache import JobOutcome, JobStatus, TieredCache
from headwater.scheduler.blocks import BlockAllocator
from headwater.scheduler.load_state import PendingLoad
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.request import SequenceOutput, TokenLogprobs
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.stats import Totals

ApplyToken = Callable[[Sequence, int, TokenLogprobs | None, float], SequenceOutput]
"""Applies a sampled token to its sequence and returns the output."""


class OverlappedLoads:
    """Confirms or restarts an overlapping sequence when its load has ended."""

    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockAllocator,
        totals: Totals,
        cache: TieredCache,
        apply_token: ApplyToken,
    ) -> None:
        self._cache = cache
        self._table = table
        self._blocks = blocks
        self._totals = totals
        self._apply_token = apply_token

    def begin(self, sequence: Sequence) -> None:
        """The first chunk of `sequence` is in flight: it reads the target slots of the load, so
        the outcome of the load is deferred until the step is collected."""
        overlap = sequence.overlap
        assert overlap is not None, "only a sequence with an overlapped load begins one"
        self._cache.defer_job(overlap.job)
        if isinstance(overlap.load.owner, PendingLoad):
            overlap.load.owner.overlapped = sequence
        self._table.move(sequence, SequenceState.OVERLAPPING)

    def collect(
        self,
        sequence: Sequence,
        num_tokens: int,
        token: int | None,
        chosen: TokenLogprobs | None,
    ) -> None:
        """Hold back the result of the computed chunk until the load is done."""
        overlap = sequence.overlap
        assert overlap is not None, "an overlapping sequence has a load"
        sequence.num_in_flight -= 1
        overlap.hold(num_tokens, token, chosen)

    def finish(
        self, sequence: Sequence, outcome: JobOutcome, now: float
    ) -> list[SequenceOutput]:
        """The load of `sequence` ended, and the cache has applied the outcome: the sequence
        continues or starts again. Returns the output that was held back, if there is one."""
        overlap = sequence.overlap
        if sequence.state is not SequenceState.OVERLAPPING or overlap is None:
            return []
        if outcome.status is not JobStatus.DONE or not self._blocks.confirm(sequence, now):
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
        return [self._apply_token(sequence, overlap.token, overlap.logprobs, now)]
