"""A step as one packed message: the part of a `ScheduledBatch` that a rank needs, as 32-bit
integers.

    header | rows: number, context, carry, table length | query starts | sampled
           | scored: row, places | tokens | positions | block tables that changed

A rank neither samples nor knows requests: rows have numbers instead of names, and parameters,
grammars and histories stay on rank 0. A block table is sent only if it is another array than in
the previous step: a sequence gets a new array when it appends to its table. Most decode steps
send none.
"""

from itertools import accumulate, count, pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headwater.errors import InvariantError
from headwater.scheduler.batch import ScheduledBatch
from headwater.types import RequestId, Slots, Tokens

_HEADER = 6
"""Step, rows, tokens, sampled rows, scored rows, slots in the tables that are sent."""

_SAME = -1
"""Length of a table that is not sent, because the rank has it from the previous step."""

Ints32 = NDArray[np.int32]


class StepPacker:
    """Packs one step after another; remembers the rows of the last one."""

    def __init__(self) -> None:
        self._known: dict[RequestId, tuple[int, Slots]] = {}
        """Number and block table of each row of the previous step."""
        self._next = count()

    def pack(self, batch: ScheduledBatch, tokens: Tokens) -> memoryview:
        """The message of `batch`; `tokens` are its tokens, with the known carried ones filled
        in."""
        numbers, widths, sent = self._rows(batch)
        header = (
            batch.step & 0x7FFFFFFF,
            len(numbers),
            len(tokens),
            len(batch.sampled),
            len(batch.scored),
            sum(map(len, sent)),
        )
        scored = [(row, len(targets)) for row, (targets, _) in batch.scored.items()]
        parts: list[NDArray[Any]] = [
            np.array((*header, *numbers), dtype=np.int32),
            batch.context_lens,
            batch.carry,
            np.array(widths, dtype=np.int32),
            batch.query_start,
            batch.sampled,
            np.array(scored, dtype=np.int32).reshape(-1),
            tokens,
            batch.positions,
            *sent,
        ]
        whole: Ints32 = np.concatenate(parts, dtype=np.int32, casting="same_kind")
        return whole.data.cast("B")

    def _rows(self, batch: ScheduledBatch) -> tuple[list[int], list[int], list[Slots]]:
        """Number and table length of each row, and the tables to send. Requests that are not in
        this step are forgotten."""
        known = self._known
        numbers, widths, sent = [], [], []
        for name, table in zip(batch.request_ids, batch.block_tables, strict=True):
            number, last = known.get(name) or (next(self._next) & 0x7FFFFFFF, None)
            numbers.append(number)
            if table is last:
                widths.append(_SAME)
            else:
                widths.append(len(table))
                sent.append(table)
        if sent or len(numbers) != len(known):
            rows = zip(batch.request_ids, numbers, batch.block_tables, strict=True)
            self._known = {name: (number, table) for name, number, table in rows}
        return numbers, widths, sent


class StepUnpacker:
    """Unpacks what a `StepPacker` packed, in the same order."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._names: list[RequestId] = []
        self._tables: list[Slots] = []
        """Names and tables of the rows of the previous step."""

    def unpack(self, payload: memoryview) -> ScheduledBatch:
        """The batch of a message, as far as a rank needs it.

        Every rank does this before it computes, so it uses plain slicing: numpy's `split` and
        `cumsum` take longer than everything here.
        """
        ints: Ints32 = np.frombuffer(payload, dtype=np.int32)
        step, rows, tokens, sampled, scored, slots = ints[:_HEADER].tolist()
        sizes = (rows, rows, rows, rows, rows + 1, sampled, 2 * scored, tokens, tokens, slots)
        ends = list(accumulate(sizes, initial=_HEADER))
        if ends[-1] != len(ints):
            raise InvariantError(
                f"a step message has {len(ints)} numbers, but its header says {ends[-1]}"
            )
        parts = [ints[start:end] for start, end in pairwise(ends)]
        numbers, contexts, carry, widths, starts, chosen, places, ids, positions, table = parts
        self._note(numbers.tolist(), widths.tolist(), table)
        return ScheduledBatch(
            step=step,
            request_ids=self._names,
            tokens=ids,
            positions=positions,
            query_start=starts,
            context_lens=contexts,
            block_tables=self._tables,
            sampled=chosen,
            params=[],
            scored={
                row: (np.zeros(length, dtype=np.int32), 0)
                for row, length in places.reshape(-1, 2).tolist()
            },
            carry=carry,
        )

    def _note(self, numbers: list[int], widths: list[int], sent: Ints32) -> None:
        """Store the names and tables of the rows of this step."""
        if not len(sent) and numbers == self._numbers:
            return
        known = dict(zip(self._numbers, self._tables, strict=True))
        slots: Slots = sent.astype(np.int64)
        ends = accumulate((max(width, 0) for width in widths), initial=0)
        self._tables = [
            known[number] if width == _SAME else slots[start:end]
            for number, width, (start, end) in zip(numbers, widths, pairwise(ends), strict=True)
        ]
        self._numbers = numbers
        self._names = cast(list[RequestId], list(map(str, numbers)))
