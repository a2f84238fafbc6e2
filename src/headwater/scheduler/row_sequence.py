"""A decoding sequence whose counters are in arrays, so that a step changes those of all at once.

With a thousand decoding sequences, changing the counters of each in Python would take
milliseconds per step. A sequence that only decodes becomes a `RowSequence`: the same object, with
the same slots, but its counters are one column of `ProgressArrays`. It reads like any other
sequence.

    buffer     | prompt ... output ......... |            the tokens of one sequence
    recent                                   | t t t |    tokens sampled since, in the arrays
               0                        num_settled   num_tokens
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headwater.scheduler.sequence import Sequence
from headwater.types import Slots, Tokens

Counts = NDArray[np.int64]

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
"""Numbers that are in both; the sequence changes them rarely."""

_FIELDS = (*_COUNTERS, *_LIMITS, "num_settled", "entry")


class ProgressArrays:
    """The counters of many sequences: one array per counter, one column per sequence.

    A column is used again when its sequence has left. `entry` tells the users of a column apart.
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
        """The sequence of `column` has left."""
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
    """A counter of a sequence that is an element of an array."""

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
        """Its first `num_blocks` blocks are committed, or equal to committed ones."""
        super().note_committed(num_blocks)
        self.arrays.commit_at[self.column] = self.commit_at

    def settle(self) -> None:
        """Copy its recent tokens from the arrays to its buffer."""
        arrays, column = self.arrays, self.column
        start, end = arrays.num_settled.item(column), arrays.num_tokens.item(column)
        if start < end:
            self.write_tokens(start, arrays.recent[column, : end - start])
            arrays.num_settled[column] = end


def enter_arrays(sequence: Sequence, arrays: ProgressArrays) -> RowSequence:
    """Move the counters of `sequence` to `arrays`. It is the same object afterwards."""
    column, entry = arrays.take()
    numbers = [getattr(sequence, name) for name in (*_COUNTERS, *_LIMITS)]
    arrays.values[:, column] = (*numbers, sequence.num_tokens, entry)
    # Both classes have the same slots, so every reference to the sequence stays valid.
    sequence.__class__ = RowSequence
    entered = cast("RowSequence", sequence)
    entered.arrays, entered.column = arrays, column
    return entered


def leave_arrays(sequence: RowSequence) -> int:
    """Move the counters of `sequence` back into it. Returns the column that it had."""
    sequence.settle()
    arrays, column = sequence.arrays, sequence.column
    numbers = arrays.values[: len(_COUNTERS), column].tolist()
    arrays.free(column)
    sequence.__class__ = Sequence  # type: ignore[assignment]  # the same slots
    for name, number in zip(_COUNTERS, numbers, strict=True):
        setattr(sequence, name, number)
    return column
