"""Sequences that only decode, handled together: a step changes all of them with array operations.

A sequence gets a row here when each of its next steps computes one token and samples one, and
nothing else has to be looked at: it has sent its first output, no log-probabilities were
requested, and it has no grammar. A few array comparisons per step find the sequences that need
more: a block, a commit, an end. Those are handled one by one, like sequences without a row.

With a thousand decoding sequences, changing the counters of each in Python would take
milliseconds per step. A sequence with a row is therefore a `RowSequence`: the same object, with
the same slots, but its counters are one column of `ProgressArrays`. It reads like any other
sequence.

    buffer     | prompt ... output ......... |            the tokens of one sequence
    recent                                   | t t t |    tokens sampled since, in the arrays
               0                        num_settled   num_tokens
"""

from collections import Counter
from itertools import compress
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from headwater.scheduler.request import SamplingParams
from headwater.scheduler.sequence import Sequence
from headwater.types import RequestId, Slots, Tokens

Counts = NDArray[np.int64]

_MIN_SEQUENCES = 16
"""With fewer decoding sequences no rows are made: one by one they take less time."""

RECENT_TOKENS = 64
"""Tokens of a sequence that the arrays hold before they are copied to its buffer."""

_FIRST_COLUMNS = 64

_COUNTERS = (
    "num_scheduled",
    "num_computed",
    "num_tokens",
    "num_in_flight",
    "last_token",
    "row",
)
"""Counters that are in the arrays instead of in the sequence."""

_LIMITS = ("schedulable_end", "max_computed", "commit_at", "num_tokens_end")
"""Numbers that are both in the arrays and in the sequence, which changes them rarely."""

_FIELDS = (*_COUNTERS, *_LIMITS, "num_settled", "entry")


class ProgressArrays:
    """The counters of many sequences: one array per counter, one column per sequence.

    A column is used again when its sequence has no row any more. `entry` distinguishes the
    sequences that have had a column.
    """

    num_scheduled: Counts
    num_computed: Counts
    num_tokens: Counts
    num_in_flight: Counts
    last_token: Counts
    row: Counts
    schedulable_end: Counts
    max_computed: Counts
    commit_at: Counts
    num_tokens_end: Counts
    num_settled: Counts
    """Tokens that are in the sequence's own buffer; the others are in `recent`."""
    entry: Counts
    """A number for each time that a column was taken; no two are equal."""

    def __init__(self) -> None:
        self.values = np.zeros((len(_FIELDS), 0), dtype=np.int64)
        self.recent = np.zeros((0, RECENT_TOKENS), dtype=np.int32)
        self._free: list[int] = []
        self._num_entries = 0
        self._resize(_FIRST_COLUMNS)

    def take(self) -> tuple[int, int]:
        """A column that no sequence has, and the number of this entry."""
        if not self._free:
            self._resize(2 * self.values.shape[1])
        self._num_entries += 1
        return self._free.pop(), self._num_entries

    def free(self, column: int) -> None:
        """Free `column`, whose sequence has no row any more."""
        # A step in flight compares this with the entry that it knew (`changed`). So the step
        # notices that its sequence has no row any more, even when another sequence has the
        # column by then.
        self.entry[column] = 0
        self._free.append(column)

    def _resize(self, num_columns: int) -> None:
        old = self.values.shape[1]
        values = np.zeros((len(_FIELDS), num_columns), dtype=np.int64)
        values[:, :old] = self.values
        recent = np.zeros((num_columns, RECENT_TOKENS), dtype=np.int32)
        recent[:old] = self.recent
        self.values, self.recent = values, recent
        for name, field in zip(_FIELDS, values, strict=True):
            setattr(self, name, field)
        self._free += range(num_columns - 1, old - 1, -1)


def _counter(name: str) -> Any:  # noqa: ANN401 -- replaces an attribute that is an int
    """A property that reads and writes this counter of a sequence in the arrays."""

    def read(sequence: "RowSequence") -> int:
        value: int = getattr(sequence.arrays, name).item(sequence.column)
        return value

    def write(sequence: "RowSequence", value: int) -> None:
        getattr(sequence.arrays, name)[sequence.column] = value

    return property(read, write)


class RowSequence(Sequence):
    """A sequence that has a column of `arrays`."""

    __slots__ = ()

    has_row = True
    arrays: ProgressArrays
    column: int

    num_scheduled = _counter("num_scheduled")
    num_computed = _counter("num_computed")
    num_tokens = _counter("num_tokens")
    num_in_flight = _counter("num_in_flight")
    last_token = _counter("last_token")
    row = _counter("row")

    def first_tokens(self, count: int) -> Tokens:
        """Its first `count` tokens. A view."""
        self.settle()
        return super().first_tokens(count)

    def append(self, token: int) -> None:
        """Append a sampled token, whose KV is not written yet."""
        self.settle()
        super().append(token)
        self.arrays.num_settled[self.column] = self.num_tokens

    def fast_forward(self, tokens: Tokens, row: int) -> None:
        """Apply several steps at once. Each computed one token and sampled one of `tokens`."""
        self.settle()
        super().fast_forward(tokens, row)
        self.arrays.num_settled[self.column] = self.num_tokens

    def extend(self, slots: Slots) -> None:
        """Append `slots` to its block table."""
        super().extend(slots)
        self.arrays.schedulable_end[self.column] = self.schedulable_end

    def note_committed(self, num_blocks: int) -> None:
        """Record that the first `num_blocks` blocks are committed, or equal to committed
        ones."""
        super().note_committed(num_blocks)
        self.arrays.commit_at[self.column] = self.commit_at

    def settle(self) -> None:
        """Copy its recent tokens from the arrays to its buffer."""
        arrays, column = self.arrays, self.column
        start, end = arrays.num_settled.item(column), arrays.num_tokens.item(column)
        if start < end:
            self.write_tokens(start, arrays.recent[column, : end - start])
            arrays.num_settled[column] = end


def _enter_arrays(sequence: Sequence, arrays: ProgressArrays) -> RowSequence:
    """Move the counters of `sequence` to `arrays`. It is the same object afterwards."""
    column, entry = arrays.take()
    numbers = [getattr(sequence, name) for name in (*_COUNTERS, *_LIMITS)]
    arrays.values[:, column] = (*numbers, sequence.num_tokens, entry)
    # Both classes have the same slots, so every reference to the sequence stays valid.
    sequence.__class__ = RowSequence
    entered = cast("RowSequence", sequence)
    entered.arrays, entered.column = arrays, column
    return entered


def _leave_arrays(sequence: RowSequence) -> int:
    """Move the counters of `sequence` back into it. Returns the column that it had."""
    sequence.settle()
    arrays, column = sequence.arrays, sequence.column
    numbers = arrays.values[: len(_COUNTERS), column].tolist()
    arrays.free(column)
    sequence.__class__ = Sequence  # type: ignore[assignment]  # the same slots
    for name, number in zip(_COUNTERS, numbers, strict=True):
        setattr(sequence, name, number)
    return column


class RowStep(NamedTuple):
    """The rows of one step, in the order of the batch, as they were when it was scheduled."""

    sequences: list[RowSequence]
    request_ids: list[RequestId]
    params: list[SamplingParams]
    columns: Counts
    entries: Counts
    num_scheduled: Counts
    """Tokens that were scheduled before this step."""
    num_tokens: Counts
    last_tokens: Counts
    last_rows: Counts

    def select(self, kept: NDArray[np.bool_]) -> "RowStep":
        """Only the rows where `kept` is true."""
        lists = (list(compress(part, kept)) for part in self[:3])
        return RowStep(*lists, *(part[kept] for part in self[3:]))  # type: ignore[arg-type]


_NO_COUNTS = np.empty(0, dtype=np.int64)
NO_ROWS = RowStep([], [], [], *(_NO_COUNTS,) * 6)


class DecodeRows:
    """The sequences that have a row, in the order in which they got it."""

    def __init__(self) -> None:
        self.min_sequences = _MIN_SEQUENCES
        self._arrays = ProgressArrays()
        self.sequences: list[RowSequence] = []
        self._request_ids: list[RequestId] = []
        self._params: list[SamplingParams] = []
        self._columns = _NO_COUNTS
        self._stops: Counter[int] = Counter()
        """Stop tokens of all sequences here, with the number of sequences that have each."""

    def add(self, sequences: list[Sequence]) -> None:
        """Give each sequence a row."""
        entered = [_enter_arrays(sequence, self._arrays) for sequence in sequences]
        self.sequences += entered
        self._request_ids += [sequence.request_id for sequence in sequences]
        self._params += [sequence.params for sequence in sequences]
        columns = np.array([sequence.column for sequence in entered], dtype=np.int64)
        self._columns = np.append(self._columns, columns)
        for sequence in sequences:
            self._stops.update(sequence.stop_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Handle `sequence` on its own from now on. A sequence without a row is ignored."""
        if not isinstance(sequence, RowSequence):
            return
        column = _leave_arrays(sequence)
        at = int(np.flatnonzero(self._columns == column)[0])
        self._columns = np.delete(self._columns, at)
        del self.sequences[at], self._request_ids[at], self._params[at]
        for token in sequence.stop_tokens:
            self._stops[token] -= 1
            if not self._stops[token]:
                del self._stops[token]

    def in_need(self) -> list[Sequence]:
        """Sequences that need a block before their next step."""
        arrays, columns = self._arrays, self._columns
        scheduled = arrays.num_scheduled[columns]
        # Also true at the end of a sequence, which needs no block, because its last token is
        # not computed: the other condition below leaves it out.
        is_short = arrays.schedulable_end[columns] <= scheduled
        if not is_short.any():
            return []
        return list(
            compress(self.sequences, is_short & (scheduled < arrays.max_computed[columns]))
        )

    def ready(self) -> RowStep:
        """The rows of the next step: all but those that lack a block or have their last token."""
        arrays, columns = self._arrays, self._columns
        scheduled = arrays.num_scheduled[columns]
        step = RowStep(
            self.sequences.copy(),
            self._request_ids.copy(),
            self._params.copy(),
            columns,
            arrays.entry[columns],
            scheduled,
            arrays.num_tokens[columns],
            arrays.last_token[columns],
            arrays.row[columns],
        )
        is_ready = scheduled < arrays.schedulable_end[columns]
        return step if is_ready.all() else step.select(is_ready)

    def begin(self, step: RowStep) -> None:
        """Count `step` as in flight; its rows are the first of the batch."""
        arrays, columns = self._arrays, step.columns
        arrays.num_scheduled[columns] = step.num_scheduled + 1
        arrays.num_in_flight[columns] += 1
        arrays.row[columns] = np.arange(len(columns))

    def changed(self, step: RowStep) -> NDArray[np.bool_]:
        """Which rows of `step` are of sequences that have no row any more."""
        is_changed: NDArray[np.bool_] = self._arrays.entry[step.columns] != step.entries
        return is_changed

    def append_tokens(self, step: RowStep, tokens: Tokens) -> None:
        """Append the `tokens` that a collected step sampled. No row of the step may have
        changed."""
        arrays, columns = self._arrays, step.columns
        num_tokens = arrays.num_tokens[columns]
        num_recent = num_tokens - arrays.num_settled[columns]
        # `recent` has room for this token: it is copied to the buffer and emptied below when it
        # is full.
        arrays.recent[columns, num_recent] = tokens
        arrays.num_tokens[columns] = num_tokens + 1
        arrays.last_token[columns] = tokens
        arrays.num_computed[columns] += 1
        arrays.num_in_flight[columns] -= 1
        for at in np.flatnonzero(num_recent == RECENT_TOKENS - 1).tolist():
            step.sequences[at].settle()

    def filled(self, step: RowStep) -> list[Sequence]:
        """Sequences whose block was filled by `step`, which was collected last."""
        arrays, columns = self._arrays, step.columns
        is_filled = arrays.num_computed[columns] == arrays.commit_at[columns]
        return list(compress(step.sequences, is_filled)) if is_filled.any() else []

    def may_end(self, step: RowStep, tokens: Tokens) -> list[int]:
        """Rows of `step`, which was collected last, that may have got their last token."""
        arrays, columns = self._arrays, step.columns
        is_last = arrays.num_tokens[columns] >= arrays.num_tokens_end[columns]
        stops = self._stops
        if stops and not stops.keys().isdisjoint(listed := tokens.tolist()):
            is_last |= [token in stops for token in listed]
        return np.flatnonzero(is_last).tolist()

    def num_quiet_steps(self) -> int:
        """Next steps in which no sequence here needs a block, fills one or gets its last token.
        0 if a stop token may end one of them."""
        if self._stops:
            return 0
        arrays, columns = self._arrays, self._columns
        left = np.minimum(
            arrays.schedulable_end[columns] - arrays.num_scheduled[columns],
            arrays.commit_at[columns] - arrays.num_computed[columns] - 1,
        )
        left = np.minimum(left, arrays.num_tokens_end[columns] - arrays.num_tokens[columns] - 1)
        return max(int(left.min()), 0)

    def agrees_with(self, decoding: list[Sequence]) -> bool:
        """Whether the rows are those of the sequences of `decoding` that have one, in any order,
        and their stop tokens are counted."""
        stops: Counter[int] = Counter()
        for sequence in self.sequences:
            stops.update(sequence.stop_tokens)
        members = {sequence for sequence in decoding if sequence.has_row}
        return (
            members == set(self.sequences)
            and len(members) == len(self.sequences) == len(self._columns)
            and self._request_ids == [sequence.request_id for sequence in self.sequences]
            and stops == self._stops
        )
