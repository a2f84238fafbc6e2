"""Sequences that only decode, handled together: a step changes all of them with array operations.

A sequence gets a row here when each of its next steps computes one token and samples one, and
nothing else has to be looked at: its first output is out, no log-probabilities are asked for, and
it has no grammar. A few array comparisons per step find the sequences that need more: a block, a
commit, an end. Those are handled one by one, like sequences without a row.
"""

from collections import Counter
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.scheduler.request import SamplingParams
from headwater.scheduler.row_sequence import (
    RECENT_TOKENS,
    Counts,
    ProgressArrays,
    RowSequence,
    enter_arrays,
    leave_arrays,
)
from headwater.scheduler.sequence import Sequence
from headwater.types import RequestId, Tokens

MIN_SEQUENCES = 16
"""With fewer decoding sequences no rows are made: one by one they take less time."""


class RowStep(NamedTuple):
    """The rows of one step, in the order of the batch, as they were when it was scheduled."""

    sequences: list[RowSequence]
    request_ids: list[RequestId]
    params: list[SamplingParams]
    columns: Counts
    entries: Counts
    num_scheduled: Counts
    """Before this step."""
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
        self.min_sequences = MIN_SEQUENCES
        self._arrays = ProgressArrays()
        self.sequences: list[RowSequence] = []
        self._request_ids: list[RequestId] = []
        self._params: list[SamplingParams] = []
        self._columns = _NO_COUNTS
        self._stops: Counter[int] = Counter()
        """Stop tokens of all sequences here, with the number of sequences that have each."""

    def add(self, sequences: list[Sequence]) -> None:
        """Give each a row."""
        entered = [enter_arrays(sequence, self._arrays) for sequence in sequences]
        self.sequences += entered
        self._request_ids += [sequence.request_id for sequence in sequences]
        self._params += [sequence.params for sequence in sequences]
        columns = np.array([sequence.column for sequence in entered], dtype=np.int64)
        self._columns = np.append(self._columns, columns)
        for sequence in sequences:
            self._stops.update(sequence.stop_tokens)

    def remove(self, sequence: Sequence) -> None:
        """From now on it is handled on its own. One without a row is ignored."""
        if not isinstance(sequence, RowSequence):
            return
        column = leave_arrays(sequence)
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
        """`step` is in flight from now on; its rows are the first of the batch."""
        arrays, columns = self._arrays, step.columns
        arrays.num_scheduled[columns] = step.num_scheduled + 1
        arrays.num_in_flight[columns] += 1
        arrays.row[columns] = np.arange(len(columns))

    def changed(self, step: RowStep) -> NDArray[np.bool_]:
        """Which rows of `step` are of sequences that have no row any more."""
        is_changed: NDArray[np.bool_] = self._arrays.entry[step.columns] != step.entries
        return is_changed

    def append_tokens(self, step: RowStep, tokens: Tokens) -> None:
        """The step was collected and sampled `tokens`. No row may have changed."""
        arrays, columns = self._arrays, step.columns
        num_tokens = arrays.num_tokens[columns]
        num_recent = num_tokens - arrays.num_settled[columns]
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
        None where a stop token may end one."""
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
