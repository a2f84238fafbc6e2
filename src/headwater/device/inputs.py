"""A `ScheduledBatch` as tensors: everything that a forward pass reads, made once per step.

numpy does the arithmetic, over whole arrays; nothing here loops over tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.device.attention.batched import BatchedDecodes
from headwater.device.attention.chunk import ChunkRow
from headwater.device.attention.sdpa import SdpaStep
from headwater.device.attention.shared import shared_tokens
from headwater.device.contiguous_kv import ContiguousKV
from headwater.device.kv import Ints, KVPool
from headwater.scheduler.batch import ScheduledBatch
from headwater.types import Slots, Tokens


@dataclass(slots=True, kw_only=True, eq=False)
class StepInputs:
    """The inputs of the model. Tokens may be padded at the end."""

    tokens: Tensor
    """`[1, tokens]`, as are the positions."""

    positions: Tensor
    logits_at: Tensor
    """Index of the last token of each sampled row; 0 alone if no row is sampled."""

    attention: SdpaStep


class _Tables:
    """The block tables of a batch as one array, addressed by row and block."""

    def __init__(self, tables: list[Slots]) -> None:
        self._flat = np.concatenate(tables).astype(np.int64, copy=False)
        self._widths = np.array([len(table) for table in tables], dtype=np.int64)
        self._starts = np.cumsum(self._widths) - self._widths

    def slots(self, rows: Ints, blocks: Ints) -> Ints:
        slots: Ints = self._flat[self._starts[rows] + blocks]
        return slots

    def padded(self, rows: Ints, num_blocks: int) -> Slots:
        """`[rows, num_blocks]`; after the end of a table its last slot is repeated."""
        wanted = np.minimum(np.arange(num_blocks), self._widths[rows, None] - 1)
        slots: Slots = self._flat[self._starts[rows, None] + wanted]
        return slots


def build(
    batch: ScheduledBatch, tokens: Tokens, *, pool: KVPool, buffers: ContiguousKV, min_rows: int
) -> StepInputs:
    """Inputs of one step. `tokens` are those of the batch, with carried ones filled in.

    Marks the slots that the step will write, and moves sequences into and out of buffers.
    """
    starts = batch.query_start.astype(np.int64)
    contexts = batch.context_lens.astype(np.int64)
    counts = np.diff(starts)
    positions = batch.positions.astype(np.int64)
    tables = _Tables(batch.block_tables)
    row_of = np.repeat(np.arange(batch.num_rows), counts)
    slots = tables.slots(row_of, positions // pool.block_tokens)
    together = _batched(counts, contexts, buffers)
    decodes = _decodes(batch, tables, np.flatnonzero(together), pool=pool, buffers=buffers)
    pool.mark_written(np.unique(slots))
    if decodes is not None:
        decodes.advance()
    step = SdpaStep(
        pool,
        pool_rows=pool.rows_of(slots, positions % pool.block_tokens),
        chunks=_chunks(np.flatnonzero(~together), starts, contexts, tables, pool),
        chunk_tokens=torch.from_numpy(np.flatnonzero(~together[row_of])).to(pool.device),
        decodes=decodes.step if decodes is not None else None,
        decode_tokens=torch.from_numpy(np.flatnonzero(together[row_of])).to(pool.device),
    )
    last = starts[1:][batch.sampled] - 1
    if batch.scored:
        last = np.concatenate((last, batch.scored_places().astype(np.int64)))
    if not len(last):
        last = np.zeros(1, dtype=np.int64)
    return StepInputs(
        tokens=_padded(tokens, min_rows, pool.device),
        positions=_padded(positions, min_rows, pool.device),
        logits_at=torch.from_numpy(last).to(pool.device),
        attention=step,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Decodes:
    """Decode rows in contiguous buffers, until their KV is written to the pool."""

    step: BatchedDecodes
    storage: ContiguousKV
    buffers: Ints
    tables: Slots
    contexts: Ints

    def advance(self) -> None:
        self.storage.advance(self.buffers, self.tables, self.contexts)


def _batched(counts: Ints, contexts: Ints, buffers: ContiguousKV) -> NDArray[np.bool_]:
    """Which rows are attended in buffers."""
    together: NDArray[np.bool_] = counts == 1
    if together.any():
        single = np.flatnonzero(together)
        together[single] = buffers.choose(contexts[single])
    return together


def _decodes(
    batch: ScheduledBatch, tables: _Tables, rows: Ints, *, pool: KVPool, buffers: ContiguousKV
) -> _Decodes | None:
    if len(rows) == 0:
        return None
    contexts = batch.context_lens[rows].astype(np.int64)
    width = -(-int(contexts.max()) // pool.block_tokens)
    padded = tables.padded(rows, width)
    ids = [batch.request_ids[row] for row in rows.tolist()]
    shared = shared_tokens(padded, contexts, pool.block_tokens)
    placed, end = buffers.place(
        ids, padded, contexts, shared_blocks=shared // pool.block_tokens
    )
    step = BatchedDecodes(
        pool,
        buffers,
        buffers=placed,
        end=end,
        contexts=contexts,
        tokens=batch.query_start[rows].astype(np.int64),
        shared=shared,
    )
    return _Decodes(
        step=step, storage=buffers, buffers=placed, tables=padded, contexts=contexts
    )


def _chunks(
    rows: Ints, starts: Ints, contexts: Ints, tables: _Tables, pool: KVPool
) -> list[ChunkRow]:
    chunks = []
    for row in rows.tolist():
        context = int(contexts[row])
        blocks = np.arange(-(-context // pool.block_tokens))
        slots = tables.slots(np.full(len(blocks), row), blocks)
        chunks.append(
            ChunkRow(
                start=int(starts[row]),
                end=int(starts[row + 1]),
                context=context,
                slots=torch.from_numpy(slots).to(pool.device),
            )
        )
    return chunks


def _padded(values: NDArray[np.int64] | Tokens, min_rows: int, device: torch.device) -> Tensor:
    whole = np.zeros(max(len(values), min_rows), dtype=np.int64)
    whole[: len(values)] = values
    return torch.from_numpy(whole)[None].to(device)
