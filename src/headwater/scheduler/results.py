"""Applies the result of a step to its sequences: tokens, commits, ends, preemptions.

Blocks are committed here, because the step that filled them is done. Sequences of equal length fill
their blocks in the same step. Their commits are spread over the following steps, so that no step
takes much longer than the others; a sequence that ends or is preempted commits at once.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from itertools import compress, islice
from typing import overload

import numpy as np
from numpy.typing import NDArray

from headwater.cache import TieredCache
from headwater.errors import InvariantError
from headwater.scheduler.batch import NO_TOKEN, InFlightStep, StepResult
from headwater.scheduler.blocks import BlockAllocator, GrowthEstimate
from headwater.scheduler.decode_rows import RowStep
from headwater.scheduler.overlap import OverlappedLoads
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.request import SequenceOutput, TokenLogprobs
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.stats import Totals
from headwater.types import RequestId, Tokens


class StepOutputs(Listed[SequenceOutput]):
    """The outputs of one step.

    Nearly all outputs are one token and nothing else. Those are kept as two columns, so that they
    cost no object each on the loop's thread; a reader that wants them one by one gets objects.
    """

    __slots__ = ("others", "request_ids", "tokens")

    def __init__(self, others: list[SequenceOutput]) -> None:
        self.others = others
        """All other outputs: with several tokens, with further fields, or the last of a
        sequence."""
        self.request_ids: list[RequestId] = []
        """The request of each of `tokens`."""
        self.tokens: Tokens = np.empty(0, dtype=np.int32)
        """The only new token of each of `request_ids`."""

    def add_tokens(
        self, request_ids: list[RequestId], tokens: Tokens, kept: NDArray[np.bool_]
    ) -> None:
        """Set the one token of each of `request_ids` for which `kept` is true. Called once."""
        if not kept.all():
            request_ids, tokens = list(compress(request_ids, kept)), tokens[kept]
        self.request_ids, self.tokens = request_ids, tokens

    def __len__(self) -> int:
        return len(self.others) + len(self.request_ids)

    def __iter__(self) -> Iterator[SequenceOutput]:
        yield from self.others
        for request_id, token in zip(self.request_ids, self.tokens.tolist(), strict=True):
            yield SequenceOutput(request_id, [token], [None])

    @overload
    def __getitem__(self, at: int) -> SequenceOutput: ...
    @overload
    def __getitem__(self, at: slice) -> list[SequenceOutput]: ...
    def __getitem__(self, at: int | slice) -> SequenceOutput | list[SequenceOutput]:
        return list(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listed) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Preemption:
    """Takes blocks from decoding sequences for sequences that need a block now.

    Only decoding sequences are preempted. Their full blocks, prompt and output, are committed, so
    a preempted sequence resumes by an ordinary prefix match. The request object is never changed.
    """

    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockAllocator,
        growth: GrowthEstimate,
        totals: Totals,
        *,
        save: bool,
    ) -> None:
        """`save` says whether the blocks of a preempted sequence are offloaded."""
        self._table = table
        self._blocks = blocks
        self._growth = growth
        self._totals = totals
        self._save = save

    def make_room(self, in_need: Iterable[Sequence], now: float) -> None:
        """Give each of `in_need` one block, and preempt victims until there are enough.

        Stops early if the step in flight will free slots when it is collected, because a
        preemption may then be unnecessary. A sequence in need may be the victim itself.
        """
        for sequence in in_need:
            while sequence.state is SequenceState.DECODE:
                if self._blocks.grow((sequence,), now):
                    break
                if self._table.will_free_slots:
                    return
                self._preempt(self._table.choose_victim(), now)

    def release(self, victim: Sequence, now: float) -> None:
        """Commit the full blocks of `victim`, release all its blocks, and queue it to
        resume."""
        self._table.leave_rows(victim)
        if victim.num_computed >= victim.commit_at:
            self._blocks.commit(victim, now)
        if self._save:
            self._blocks.save(victim)
        self._blocks.release(victim, now)
        victim.load = None
        victim.num_preemptions += 1
        victim.preempted_s = now
        self._table.move(victim, SequenceState.WAITING)
        self._totals.num_preemptions += 1
        self._growth.raise_caution()

    def _preempt(self, victim: Sequence, now: float) -> None:
        """Stop scheduling `victim`. With a step in flight, its blocks are released when that
        step is collected, so that the token being sampled is neither lost nor sampled twice."""
        if victim.num_in_flight:
            self._table.move(victim, SequenceState.PREEMPTING)
        else:
            self.release(victim, now)


# Looking up an enum member takes longer than comparing it, and these are read for each row.
_PREEMPTING, _FINISHED = SequenceState.PREEMPTING, SequenceState.FINISHED

_MIN_COMMITS = 32
"""One step commits at least this many output blocks, if so many are due."""


class ResultApplier:
    """Applies a collected step to each of its sequences."""

    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockAllocator,
        growth: GrowthEstimate,
        totals: Totals,
        preemption: Preemption,
        cache: TieredCache,
    ) -> None:
        self._table = table
        self._blocks = blocks
        self._growth = growth
        self._totals = totals
        self._preemption = preemption
        self._cache = cache
        self._due: dict[Sequence, None] = {}
        """Decoding sequences with a full block to commit; the block that is due longest comes
        first."""
        self._commits_left = 0
        """Output blocks that the current step may still commit."""
        self.overlaps = OverlappedLoads(table, blocks, totals, cache, self.apply_token)

    def apply(
        self,
        step: InFlightStep,
        result: StepResult,
        outputs: StepOutputs,
        now: float,
    ) -> None:
        """Apply what `step` computed and sampled; append to `outputs`."""
        if step.step != result.step:
            raise InvariantError(f"collected step {result.step}, expected {step.step}")
        self._commit_due(step.num_decodes, now)
        if step.rows.sequences:
            self._apply_rows(step.rows, result, outputs, now)
        for row, sequence in enumerate(step.singles, len(step.rows.sequences)):
            self._apply_decode(sequence, row, result, outputs.others, now)
        if step.chunks:
            self._apply_chunks(step, result, outputs.others, now)

    def _apply_rows(
        self, rows: RowStep, result: StepResult, outputs: StepOutputs, now: float
    ) -> None:
        """Apply the first rows of a step, of sequences that only decode, all at once. A sequence
        that left the decode rows meanwhile is handled on its own."""
        decode_rows = self._table.rows
        tokens = result.tokens[: len(rows.sequences)]
        is_alone = decode_rows.changed(rows) | (tokens == NO_TOKEN)
        if is_alone.any():
            for row in np.flatnonzero(is_alone).tolist():
                self._apply_decode(rows.sequences[row], row, result, outputs.others, now)
            rows, tokens = rows.select(~is_alone), tokens[~is_alone]
        decode_rows.append_tokens(rows, tokens)
        self._totals.generated_tokens += len(tokens)
        for sequence in decode_rows.filled(rows):
            self._commit_or_postpone(sequence, now)
        goes_on = np.ones(len(tokens), dtype=np.bool_)
        for row in decode_rows.may_end(rows, tokens):
            sequence, token = rows.sequences[row], int(tokens[row])
            reason, stop_token = _end_of(sequence, token)
            if reason is not None:
                goes_on[row] = False
                self.finish(sequence, reason, now)
                name = sequence.request_id
                outputs.others.append(SequenceOutput(name, [token], [None], reason, stop_token))
        outputs.add_tokens(rows.request_ids, tokens, goes_on)

    def _apply_decode(
        self,
        sequence: Sequence,
        row: int,
        result: StepResult,
        outputs: list[SequenceOutput],
        now: float,
    ) -> None:
        """Apply one decode row. Decode rows come first and all sample, so `row` is also its
        number among the sampled rows."""
        token = int(result.tokens[row])
        if sequence.state is _FINISHED:
            self._discard_row(sequence, 1, now)
        elif token == NO_TOKEN:
            failure = result.failures.get(row)
            outputs += self._apply_missing_token(sequence, 1, failure, now)
        else:
            sequence.finish_chunk_with_token(1, token)
            outputs.append(self.apply_token(sequence, token, result.logprobs[row], now))

    def _commit_due(self, num_decodes: int, now: float) -> None:
        """Commit blocks that earlier steps filled, and set how many more this step may commit.

        That is twice the number that an average step fills, so no block stays due for long.
        """
        left = max(2 * num_decodes // self._cache.block_tokens, _MIN_COMMITS)
        for sequence in list(islice(self._due, left)):
            del self._due[sequence]
            if sequence.state is not _FINISHED and sequence.num_computed >= sequence.commit_at:
                self._blocks.commit(sequence, now)
                left -= 1
        self._commits_left = left

    def _commit_or_postpone(self, sequence: Sequence, now: float) -> None:
        """Commit a full block of a sequence that sampled a token, now or in a later step."""
        # Other sequences wait for full blocks of prompts.
        is_prompt = sequence.commit_at <= sequence.prompt_tokens
        if is_prompt or self._commits_left > 0 or sequence.state is _PREEMPTING:
            self._due.pop(sequence, None)
            self._commits_left -= 1
            self._blocks.commit(sequence, now)
        else:
            self._due[sequence] = None

    def _apply_chunks(
        self, step: InFlightStep, result: StepResult, outputs: list[SequenceOutput], now: float
    ) -> None:
        """Apply the rows of `step` that computed chunks of prompts; they follow the decodes."""
        tokens, logprobs = result.tokens.tolist(), result.logprobs
        for row, scores in result.scores.items():
            scored = step.chunks[row - step.num_decodes].sequence
            if scored.scores is not None:
                scored.scores += scores
        at = step.num_decodes
        for (sequence, num_tokens), chooses in zip(step.chunks, step.choosing, strict=True):
            if sequence.state is _FINISHED:
                self._discard_row(sequence, num_tokens, now)
            elif sequence.overlap is not None:
                held = (tokens[at], logprobs[at]) if chooses else (None, None)
                self.overlaps.collect(sequence, num_tokens, *held)
                self._cache.resume_job(sequence.overlap.job, now=now)
            elif chooses and tokens[at] == NO_TOKEN:
                failure = result.failures.get(at)
                outputs += self._apply_missing_token(sequence, num_tokens, failure, now)
            elif chooses:
                sequence.finish_chunk_with_token(num_tokens, tokens[at])
                self._table.note_computed(sequence)
                outputs.append(self.apply_token(sequence, tokens[at], logprobs[at], now))
            else:
                sequence.finish_chunk(num_tokens)
                self._table.note_computed(sequence)
                if sequence.num_computed >= sequence.commit_at:
                    self._blocks.commit(sequence, now)
            at += chooses

    def apply_token(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float
    ) -> SequenceOutput:
        """Apply a sampled token: commit full blocks, and finish or preempt the sequence if due."""
        if sequence.num_computed >= sequence.commit_at:
            self._commit_or_postpone(sequence, now)
        self._totals.generated_tokens += 1
        usage, sequence.usage = sequence.usage, None
        reason, stop_token = _end_of(sequence, token)
        if reason is not None:
            self.finish(sequence, reason, now)
        elif sequence.state is _PREEMPTING:
            self._preemption.release(sequence, now)
        output = SequenceOutput(
            sequence.request_id, [token], [logprobs], reason, stop_token, usage
        )
        if sequence.scores is not None:
            output.prompt_logprobs, sequence.scores = sequence.scores, None
        return output

    def _apply_missing_token(
        self, sequence: Sequence, num_tokens: int, failure: str | None, now: float
    ) -> list[SequenceOutput]:
        """The grammar mask was late: the sequence tries again in a later step. With a `failure`
        the sequence ends."""
        self._table.leave_rows(sequence)
        sequence.finish_chunk_without_token(num_tokens)
        if sequence.num_computed >= sequence.commit_at:
            self._blocks.commit(sequence, now)
        if failure is not None:
            self.finish(sequence, "failed", now)
            return [SequenceOutput(sequence.request_id, [], [], "failed", detail=failure)]
        if sequence.state is _PREEMPTING:
            self._preemption.release(sequence, now)
        return []

    def _discard_row(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Discard the result of a row whose sequence has finished meanwhile."""
        sequence.finish_chunk(num_tokens)
        overlap = sequence.overlap
        if not sequence.is_kept:
            self._table.departing.remove(sequence)
            self._blocks.release(sequence, now)
        if overlap is not None and not sequence.num_in_flight:
            self._cache.resume_job(overlap.job, now=now)

    def finish(self, sequence: Sequence, reason: str, now: float) -> None:
        """End a sequence. Its slots are freed now, or when nothing uses them any more."""
        if sequence in self._due:
            del self._due[sequence]
            self._blocks.commit(sequence, now)
        self._totals.finished[reason] += 1
        if reason != "abort":
            self._growth.observe(sequence.num_output)
        self._table.move(sequence, SequenceState.FINISHED)
        if not sequence.is_kept:
            self._blocks.release(sequence, now)


def _end_of(sequence: Sequence, token: int) -> tuple[str | None, int | None]:
    """Why `token`, which was sampled last, ends the sequence, and the stop token if it is one."""
    num_tokens = sequence.num_tokens
    if token in sequence.stop_tokens and num_tokens >= sequence.min_stop:
        return "stop", token
    return ("length" if num_tokens >= sequence.num_tokens_end else None), None
