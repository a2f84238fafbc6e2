"""A step as one packed message: what a rank needs of a `ScheduledBatch`, as 32-bit integers.

    header | rows: id, context, carry, table length | query starts | sampled | scored: row, places
           | tokens | positions | block tables

A rank neither samples nor knows requests: rows have numbers instead of names, and parameters,
grammars and histories stay on rank 0.
"""

from itertools import accumulate, count, pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headwater.errors import InvariantError
from headwater.scheduler.batch import ScheduledBatch
from headwater.types import RequestId, Slots, Tokens

_HEADER = 6
"""Step, rows, tokens, sampled rows, scored rows, slots in all tables."""

Ints32 = NDArray[np.int32]


class StepPacker:
    """Packs one step after another; a request keeps its number from one step to the next."""

    def __init__(self) -> None:
        self._numbers: dict[RequestId, int] = {}
        self._next = count()

    def pack(self, batch: ScheduledBatch, tokens: Tokens) -> memoryview:
        """The message of `batch`; `tokens` are its own, with those carried that are known."""
        tables = batch.block_tables
        widths = [len(table) for table in tables]
        header = (
            batch.step & 0x7FFFFFFF,
            len(tables),
            len(tokens),
            len(batch.sampled),
            len(batch.scored),
            sum(widths),
        )
        scored = [(row, len(targets)) for row, (targets, _) in batch.scored.items()]
        parts: list[NDArray[Any]] = [
            np.array((*header, *self._number(batch.request_ids)), dtype=np.int32),
            batch.context_lens,
            batch.carry,
            np.array(widths, dtype=np.int32),
            batch.query_start,
            batch.sampled,
            np.array(scored, dtype=np.int32).reshape(-1),
            tokens,
            batch.positions,
            *tables,
        ]
        whole: Ints32 = np.concatenate(parts, dtype=np.int32, casting="same_kind")
        return whole.data.cast("B")

    def _number(self, request_ids: list[RequestId]) -> list[int]:
        """Numbers of the rows' requests; those that are not in this step are forgotten."""
        known = self._numbers
        numbers = [known.get(name, -1) for name in request_ids]
        if -1 in numbers or len(numbers) != len(known):
            numbers = [
                next(self._next) & 0x7FFFFFFF if number < 0 else number for number in numbers
            ]
            self._numbers = dict(zip(request_ids, numbers, strict=True))
        return numbers


def unpack_step(payload: memoryview) -> ScheduledBatch:
    """The batch of a message, as far as a rank needs it.

    Every rank does this before it computes, so it is plain slicing: numpy's own `split` and
    `cumsum` take longer than everything here.
    """
    ints: Ints32 = np.frombuffer(payload, dtype=np.int32)
    step, rows, tokens, sampled, scored, slots = ints[:_HEADER].tolist()
    sizes = (
        _HEADER,
        rows,
        rows,
        rows,
        rows,
        rows + 1,
        sampled,
        2 * scored,
        tokens,
        tokens,
        slots,
    )
    ends = list(accumulate(sizes))
    if ends[-1] != len(ints):
        raise InvariantError(f"a step of {len(ints)} numbers says that it has {ends[-1]}")
    parts = [ints[start:end] for start, end in pairwise(ends)]
    ids, contexts, carry, widths, starts, chosen, places, ids_in, positions, tables = parts
    slots_of: Slots = tables.astype(np.int64)
    bounds = accumulate(widths.tolist(), initial=0)
    return ScheduledBatch(
        step=step,
        request_ids=cast(list[RequestId], list(map(str, ids.tolist()))),
        tokens=ids_in,
        positions=positions,
        query_start=starts,
        context_lens=contexts,
        block_tables=[slots_of[start:end] for start, end in pairwise(bounds)],
        sampled=chosen,
        params=[],
        scored={
            row: (np.zeros(length, dtype=np.int32), 0)
            for row, length in places.reshape(-1, 2).tolist()
        },
        carry=carry,
    )
