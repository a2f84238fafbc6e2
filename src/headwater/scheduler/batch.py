"""The input of one forward pass, and its result.

Both consist of arrays with one entry per sequence or token; there is never an object per token.

    rows         |  decode  |   chunk of a prompt   | decode |     one row per sequence
    tokens       |    t     |  t  t  t  t  t  t  t  |   t    |     packed, no padding
    query_start  0          1                       8        9

Also here: what a step may still compute (`StepBudget`), and a step between its scheduling and its
collection (`InFlightStep`).
"""

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from headwater.scheduler.decode_rows import Counts, RowStep
from headwater.scheduler.pacing import (
    GRAPH_CHUNK_KEYS,
    MAX_SHORT_STEPS,
    NEW_SHARE,
    affordable_tokens,
    chunk_cost,
)
from headwater.scheduler.request import SamplingParams, TokenLogprobs
from headwater.scheduler.sequence import Sequence
from headwater.types import JobId, RequestId, Slots, Tokens

IntArray = NDArray[np.int32]

NO_TOKEN = -(1 << 31)
"""Stands for the token of a row for which no token could be chosen. Other negative numbers are
tokens in a simulator's traces."""


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledBatch:
    """What one step computes. Built by the scheduler, read by the runner, never modified."""

    step: int
    """Number of this step, counting up from 0 without gaps over the submitted batches."""

    request_ids: list[RequestId]
    """The sequence of each row."""

    tokens: Tokens
    """Input token ids of all rows, packed. Undefined for a row with a `carry`."""

    positions: IntArray
    """Position of each token of `tokens` in its sequence."""

    query_start: IntArray
    """Row r owns tokens[query_start[r]:query_start[r + 1]]; one longer than the rows."""

    context_lens: IntArray
    """Per row: tokens with KV once this step is done, this step's own included."""

    block_tables: list[Slots]
    """Per row: device slots in position order, covering at least `context_lens` tokens."""

    sampled: IntArray
    """Rows that sample a token after this step: decodes, and last chunks of prompts."""

    params: list[SamplingParams]
    """Sampling parameters per *sampled* row."""

    histories: Listed[tuple[Tokens, int]] = field(default_factory=list)
    """Per *sampled* row: all tokens known so far, and how many of them are the prompt.
    Read for penalties, min_tokens, and the position that seeds randomness."""

    awaits: dict[int, JobId] = field(default_factory=dict)
    """Rows that read the targets of a load in flight, and its job. Layer l of such a row is
    computed when layer l of the load has arrived or failed. Empty unless the runner is
    `layerwise`."""

    scored: dict[int, tuple[Tokens, int]] = field(default_factory=dict)
    """Rows that report log-probabilities of prompt tokens: the token after each of the row's
    first positions, and how many alternatives are reported with it."""

    carry: IntArray
    """Per row: the row of the *previous* batch whose sampled token is this row's only input
    token, or -1 when `tokens` has it. Used when two steps are in flight."""

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    @property
    def prompt_lens(self) -> list[int]:
        """Per *sampled* row: how many of its tokens are the prompt."""
        histories = self.histories
        if isinstance(histories, TokenHistories):
            return histories.prompt_lens()
        return [prompt_len for _, prompt_len in histories]

    def scored_places(self) -> IntArray:
        """Where in `tokens` the positions of `scored` are, row by row."""
        spans = [
            np.arange(len(targets), dtype=np.int32) + self.query_start[row]
            for row, (targets, _) in self.scored.items()
        ]
        return np.concatenate(spans) if spans else np.empty(0, dtype=np.int32)


@dataclass(slots=True, kw_only=True, eq=False)
class StepResult:
    """What one step sampled. Entries follow `ScheduledBatch.sampled`."""

    step: int
    tokens: Tokens
    """NO_TOKEN for a row in `failures`, and for a row whose grammar mask was late: that row
    tries again in a later step."""

    logprobs: list[TokenLogprobs | None]
    """Per sampled row; None if none were requested."""

    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of prompt tokens, by row of `scored`."""

    failures: dict[int, str] = field(default_factory=dict)
    """Why no token can be chosen for a row, by sampled row."""

    seconds: float = 0.0
    """How long the device took for the step; 0 if the runner does not measure it."""


class Chunk(NamedTuple):
    """The next `num_tokens` tokens of a sequence that is being prefilled."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the sequence samples a token after this chunk. Call it before the step is
        scheduled."""
        return self.sequence.num_scheduled + self.num_tokens == self.sequence.num_tokens


class TokenHistories(Listed[tuple[Tokens, int]]):
    """The tokens known when a step was scheduled, and how many of them are the prompt, by row.

    Read from the sequences when asked for: most rows are never asked for. A sequence's tokens only
    grow, so reading later gives the same.
    """

    def __init__(self, sequences: list[Sequence], num_tokens: list[int]) -> None:
        self._sequences = sequences
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return len(self._sequences)

    @overload
    def __getitem__(self, at: int) -> tuple[Tokens, int]: ...
    @overload
    def __getitem__(self, at: slice) -> list[tuple[Tokens, int]]: ...
    def __getitem__(self, at: int | slice) -> tuple[Tokens, int] | list[tuple[Tokens, int]]:
        if isinstance(at, slice):
            return [self[row] for row in range(*at.indices(len(self)))]
        sequence = self._sequences[at]
        return sequence.first_tokens(self._num_tokens[at]), sequence.answer_start

    def prompt_lens(self) -> list[int]:
        """How many of the tokens are the prompt, by row; reads no tokens."""
        return [sequence.answer_start for sequence in self._sequences]


def build_batch(
    step: int,
    rows: RowStep,
    singles: Listed[Sequence],
    chunks: Listed[Chunk],
    *,
    carries: bool,
) -> ScheduledBatch:
    """The decodes of `rows`, then one row for each of `singles`, which decode too, then one for
    each of `chunks`.

    `carries` means that the previous step is in flight, so the input token of a decode may
    still be unknown.
    """
    others = [*singles, *(chunk.sequence for chunk in chunks)]
    chosen = [*singles, *(chunk.sequence for chunk in chunks if chunk.is_last)]
    num_decodes = len(rows.sequences) + len(singles)
    starts = _joined(rows.num_scheduled, [s.num_scheduled for s in others])
    counts = np.ones(len(starts), dtype=np.int32)
    counts[num_decodes:] = [chunk.num_tokens for chunk in chunks]
    query_start = np.zeros(len(starts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    known = [*rows.num_tokens.tolist(), *(s.num_tokens for s in chosen)]
    return ScheduledBatch(
        step=step,
        request_ids=[*rows.request_ids, *(s.request_id for s in others)],
        tokens=_input_tokens(rows, singles, chunks),
        positions=_positions(starts, num_decodes, chunks),
        query_start=query_start,
        context_lens=starts + counts,
        block_tables=[s.block_table for s in (*rows.sequences, *others)],
        sampled=_sampled_rows(num_decodes, chunks),
        params=[*rows.params, *(s.params for s in chosen)],
        histories=TokenHistories([*rows.sequences, *chosen], known),
        awaits=_awaits(num_decodes, chunks),
        scored=_scored(num_decodes, chunks),
        carry=_carry(rows, singles, len(starts), carries=carries),
    )


def _joined(of_rows: Counts, of_others: list[int]) -> IntArray:
    """The numbers of decode rows, then those of the other rows."""
    joined = np.empty(len(of_rows) + len(of_others), dtype=np.int32)
    joined[: len(of_rows)] = of_rows
    joined[len(of_rows) :] = of_others
    return joined


def _input_tokens(rows: RowStep, singles: Listed[Sequence], chunks: Listed[Chunk]) -> Tokens:
    tokens = _joined(rows.last_tokens, [s.last_token for s in singles])
    if not chunks:
        return tokens
    pieces = [s.tokens[s.num_scheduled : s.num_scheduled + count] for s, count in chunks]
    return np.concatenate((tokens, *pieces))


def _positions(starts: IntArray, num_decodes: int, chunks: Listed[Chunk]) -> IntArray:
    if not chunks:
        return starts
    pieces = [
        np.arange(s.num_scheduled, s.num_scheduled + count, dtype=np.int32)
        for s, count in chunks
    ]
    return np.concatenate((starts[:num_decodes], *pieces))


def _sampled_rows(num_decodes: int, chunks: Listed[Chunk]) -> IntArray:
    last = [num_decodes + at for at, chunk in enumerate(chunks) if chunk.is_last]
    rows = np.arange(num_decodes + len(last), dtype=np.int32)
    rows[num_decodes:] = last
    return rows


def _awaits(num_decodes: int, chunks: Listed[Chunk]) -> dict[int, JobId]:
    return {
        row: chunk.sequence.overlap.job
        for row, chunk in enumerate(chunks, num_decodes)
        if chunk.sequence.overlap is not None
    }


def _scored(num_decodes: int, chunks: Listed[Chunk]) -> dict[int, tuple[Tokens, int]]:
    scored = {}
    for row, (s, count) in enumerate(chunks, num_decodes):
        if s.scores is not None and s.params.prompt_logprobs is not None:
            end = min(s.num_scheduled + count + 1, s.answer_start)
            targets = s.tokens[s.num_scheduled + 1 : end]
            if len(targets):
                scored[row] = targets, s.params.prompt_logprobs
    return scored


def _carry(
    rows: RowStep, singles: Listed[Sequence], num_rows: int, *, carries: bool
) -> IntArray:
    """The row of the previous batch that samples the input token of a decode, or -1 if the
    token is known."""
    carry = np.full(num_rows, -1, dtype=np.int32)
    if carries:
        num_together = len(rows.sequences)
        is_unknown = rows.num_scheduled == rows.num_tokens
        carry[:num_together] = np.where(is_unknown, rows.last_rows, -1)
        carry[num_together : num_together + len(singles)] = [
            s.row if s.num_scheduled == s.num_tokens else -1 for s in singles
        ]
    return carry


class StepBudget:
    """Tokens left in the step being scheduled, and places left for new sequences."""

    __slots__ = ("_max_chunk", "_num_chunks", "_short_keys", "_short_tokens", "cost",
                 "num_places", "num_tokens")  # fmt: skip

    def __init__(
        self,
        *,
        num_tokens: int,
        num_places: int,
        max_chunk: int | None = None,
        cost: float = inf,
        short_tokens: float = inf,
    ) -> None:
        """`cost` bounds the total cost of the chunks, in tokens of a prompt without context.
        The step should have at most `short_tokens` tokens of short prompts, if it has no
        others."""
        self.num_tokens = num_tokens
        self.num_places = num_places
        self.cost = cost
        self._max_chunk = max_chunk or num_tokens
        self._short_tokens = short_tokens
        self._short_keys: float = inf if short_tokens == inf else GRAPH_CHUNK_KEYS
        self._num_chunks = 0

    @property
    def has_room(self) -> bool:
        """Whether one more sequence could start and compute at least one token."""
        return self.has_tokens and self.num_places > 0

    @property
    def has_tokens(self) -> bool:
        """Whether the step can compute one more token of a prompt."""
        return self.num_tokens > 0 and self.cost > 0

    def finishes(self, start: int, num_tokens: int) -> bool:
        """Whether the step can compute this many tokens after `start` others."""
        fits = num_tokens <= min(self.num_tokens, self._max_chunk)
        return fits and chunk_cost(start, num_tokens) <= self.cost

    def postpones(self, start: int, num_tokens: int, num_waiting: int) -> bool:
        """Whether a prompt that lacks this many tokens after `start` others should begin in a
        later step: this step has only short prompts so far and would become much longer, and
        the `num_waiting` sequences do not need many such steps."""
        if not self._num_chunks or num_waiting > MAX_SHORT_STEPS * self._num_chunks:
            return False
        num_keys = num_tokens * (start + num_tokens)
        return num_tokens > self._short_tokens or num_keys > self._short_keys

    def hold_for_prefills(self, num_lacking: int) -> int:
        """Reserve tokens for prefills that lack this many; the rest is for new sequences. New
        sequences keep at least one part in `NEW_SHARE` of the step. Returns the argument of
        `release`."""
        most = int(min(self.num_tokens, self.cost))
        held = min(num_lacking, most - most // NEW_SHARE)
        self.num_tokens -= held
        self.cost -= held
        return held

    def release(self, held: int) -> None:
        """Give back the reserved tokens."""
        self.num_tokens += held
        self.cost += held

    def spend_place(self) -> None:
        """Take the place of a new running sequence."""
        self.num_places -= 1

    def spend_chunk(self, sequence: Sequence) -> Chunk:
        """Spend tokens on the next chunk of a prefill and return it: as many tokens as the step
        has left, which is at least one."""
        left = sequence.num_tokens - sequence.num_scheduled
        num_tokens = min(left, self.num_tokens, self._max_chunk)
        start = sequence.num_scheduled
        if chunk_cost(start, num_tokens) > self.cost:
            num_tokens = min(num_tokens, affordable_tokens(start, self.cost))
        self.num_tokens -= num_tokens
        self.cost -= chunk_cost(start, num_tokens)
        self._num_chunks += 1
        self._short_tokens -= num_tokens
        self._short_keys -= num_tokens * (start + num_tokens)
        if self._short_tokens < 0 or self._short_keys < 0:  # not a step of short prompts
            self._short_tokens = self._short_keys = inf
        return Chunk(sequence, num_tokens)


class InFlightStep(NamedTuple):
    """The sequences of a scheduled step, in the order of the batch: decodes, then chunks."""

    step: int
    rows: RowStep
    singles: list[Sequence]
    """Decodes that had no row among `DecodeRows`."""
    chunks: list[Chunk]
    choosing: list[bool]
    """For each chunk, whether its sequence samples a token."""

    def has(self, sequence: Sequence) -> bool:
        """Whether `sequence` has a row. O(rows)."""
        chunked = (chunk.sequence for chunk in self.chunks)
        return any(s is sequence for s in (*self.rows.sequences, *self.singles, *chunked))

    @property
    def num_decodes(self) -> int:
        return len(self.rows.sequences) + len(self.singles)
