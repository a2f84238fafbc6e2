"""A `ScheduledBatch` as integer arrays, and the part that is sent to the device.

numpy does the arithmetic, over whole arrays; nothing here loops over tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.device.gpu.attention import PagedAttention, WholePrompt
from headwater.device.gpu.decoder import TokenSlots
from headwater.device.gpu.staging import Staging
from headwater.device.gpu.work import split_contexts, tiles
from headwater.device.kernels.pieces import DecodeWork
from headwater.device.kernels.prefill import has_hopper_kernel, takes_pairs
from headwater.device.kernels.tiles import ChunkWork, tile_queries
from headwater.device.kv import Ints, KVPool
from headwater.scheduler.batch import IntArray, ScheduledBatch
from headwater.types import Tokens

_CONVERTED_BYTES = 512 << 20
"""Maximum memory for one layer of 8-bit KV that is converted for the Hopper kernel."""


class Layout:
    """The rows and tokens of a batch: counts, slots, tables. Host only."""

    def __init__(self, batch: ScheduledBatch, block_tokens: int) -> None:
        self.batch = batch
        self.contexts: Ints = batch.context_lens.astype(np.int64)
        self.counts: Ints = np.diff(batch.query_start).astype(np.int64)
        widths = -(-self.contexts // block_tokens)
        self.tables: Ints = np.concatenate(
            [table[:n] for table, n in zip(batch.block_tables, widths.tolist(), strict=True)]
        )
        self.table_start: Ints = np.cumsum(widths) - widths
        self.is_decode = len(self.counts) == len(batch.tokens)
        """Whether every row has one token."""

        row_of = np.arange(batch.num_rows)
        if not self.is_decode:
            row_of = np.repeat(row_of, self.counts)
        self._token_table_start: Ints = self.table_start[row_of]
        """Per token: where the table of its row begins."""

        self.slots: Ints = self.tables[
            self._token_table_start + batch.positions // block_tokens
        ]

    @property
    def num_decodes(self) -> int:
        """Leading rows of one token."""
        longer = self.counts > 1
        return int(longer.argmax()) if longer.any() else len(self.counts)

    @property
    def num_chunk_keys(self) -> int:
        """Keys that the chunks would read if each of their tokens were a row of its own."""
        longer = self.counts > 1
        return int((self.counts[longer] * self.contexts[longer]).sum())

    def last_tokens(self) -> IntArray:
        """Per sampled row: index of its last token."""
        return self.batch.query_start[1:][self.batch.sampled] - 1

    def graph_rows(self, carry: IntArray) -> "GraphRows":
        """The step with each token as a decode row of its own. `carry` is per row of the batch.

        All layers store K and V of every row before they attend, and a row attends up to its
        own position. So the tokens of a chunk see each other as in a chunk.
        """
        batch = self.batch
        token_carry = np.full(len(batch.tokens), -1, dtype=np.int32)
        # A carried token is always the first one of its row: a chunk knows all of its tokens.
        token_carry[batch.query_start[:-1]] = carry
        return GraphRows(
            tokens=batch.tokens,
            carry=token_carry,
            positions=batch.positions,
            slots=self.slots,
            contexts=batch.positions.astype(np.int64) + 1,
            table_start=self._token_table_start,
            tables=self.tables,
        )


class GraphRows(NamedTuple):
    """Rows of one token. All but `tables` have one entry per row."""

    tokens: Tokens
    carry: IntArray
    """Index among the chosen tokens, or -1 if the token is known."""

    positions: IntArray
    slots: Ints
    contexts: Ints
    table_start: Ints
    tables: Ints
    """The tables of blocks, one after the other. Rows may share one."""


@dataclass(slots=True, kw_only=True, eq=False)
class PackedStep:
    """The inputs of a step of any composition, on the device."""

    tokens: Tensor
    carry: Tensor
    places: TokenSlots
    logits_at: Tensor
    attention: PagedAttention
    expanded: int | None = None
    """The first token of a prompt that reaches to the end of the batch and whose latents are
    expanded; None without one."""


def pack(
    layout: Layout,
    carry: IntArray,
    *,
    pool: KVPool,
    staging: Staging,
    heads: int,
    min_torch_tokens: int | None,
) -> PackedStep:
    """Send the inputs of a step. `carry` is per row: the index among the chosen tokens, or -1.
    A last row of at least `min_torch_tokens` without cached tokens is attended without the pool."""
    batch, num_decodes = layout.batch, layout.num_decodes
    whole = None if min_torch_tokens is None else _whole(layout, min_torch_tokens)
    expands = whole is not None and pool.data.shape[2] == 1
    pieces = split_contexts(layout.contexts[:num_decodes], max(num_decodes, 1), pool.kv_heads)
    chunks = slice(num_decodes, len(layout.counts) - (whole is not None))
    longest = int(layout.counts[chunks].max(initial=0))
    tile = tile_queries(pool.dtype, pool.head_dim, longest)
    shared = tiles(
        layout.counts[chunks], layout.contexts[chunks],
        first_row=num_decodes, tile=tile, heads=heads,
        has_hopper_kernel=has_hopper_kernel(pool.data, pool.dtype),
        has_pairs=takes_pairs(pool.data, heads, tile),
    )  # fmt: skip
    token_carry = np.full(len(batch.tokens), -1, dtype=np.int32)
    token_carry[batch.query_start[:-1]] = carry
    last = layout.last_tokens()
    sampled = split_contexts(layout.contexts[batch.sampled], max(len(last), 1), pool.kv_heads)
    sent = staging.send(
        [
            batch.tokens,
            token_carry,
            batch.positions,
            layout.slots.astype(np.int32),
            last,
            batch.context_lens,
            batch.query_start,
            layout.tables.astype(np.int32),
            layout.table_start.astype(np.int32),
            np.array([pieces.piece], dtype=np.int32),
            *pieces[1:],
            shared.row,
            shared.start,
            shared.part_keys,
            batch.context_lens[batch.sampled],
            layout.table_start[batch.sampled].astype(np.int32),
            np.array([sampled.piece], dtype=np.int32),
            *sampled[1:],
        ],
        pool.device,
    )
    tokens, carried, positions, slots, logits_at, contexts, starts, tables, table_start = sent[
        :9
    ]
    attention = PagedAttention(
        pool=pool.data,
        heads=heads,
        value_dim=pool.value_dim,
        whole=None if expands else whole,
    )
    if num_decodes:
        attention.num_decodes = num_decodes
        attention.decodes = decode_work(contexts, tables, table_start, sent[9:13], pool, heads)
    if len(last):
        attention.sampled = decode_work(sent[16], tables, sent[17], sent[18:22], pool, heads)
    if len(shared.row):
        rows = len(shared.row) * shared.num_parts * tile if shared.num_parts > 1 else 0
        partial, partial_lse = partials(rows, heads, pool)
        attention.chunks = ChunkWork(
            contexts=contexts,
            query_start=starts,
            tables=tables,
            table_start=table_start,
            tile=tile,
            tile_row=sent[13],
            tile_start=sent[14],
            longest_context=int(layout.contexts[chunks].max()),
            use_hopper=shared.use_hopper,
            num_parts=shared.num_parts,
            part_keys=sent[15],
            partial=partial,
            partial_lse=partial_lse,
            first_entry=int(layout.table_start[num_decodes]),
            end_entry=len(layout.tables),
        )
        if attention.chunks.end_entry - attention.chunks.first_entry > _max_converted(pool):
            attention.chunks.use_hopper = False
    return PackedStep(
        tokens=tokens,
        carry=carried,
        places=TokenSlots(positions, slots),
        logits_at=logits_at,
        attention=attention,
        expanded=whole.start if whole is not None and expands else None,
    )


def _max_converted(pool: KVPool) -> int:
    """Blocks of which one layer may be converted at once; no limit if none is converted."""
    if not pool.layout.scale_bytes:
        return pool.num_blocks * len(pool.blocks)
    layer_bytes = pool.layout.numbers_bytes * pool.dtype.itemsize
    return _CONVERTED_BYTES // layer_bytes


def _whole(layout: Layout, min_tokens: int) -> WholePrompt | None:
    """The last row, if it is a long prompt without a cached prefix."""
    count = int(layout.counts[-1])
    if count < min_tokens or count != layout.contexts[-1]:
        return None
    return WholePrompt(int(layout.batch.query_start[-2]), count)


def decode_work(
    contexts: Tensor,
    tables: Tensor,
    table_start: Tensor,
    pieces: list[Tensor],
    pool: KVPool,
    heads: int,
) -> DecodeWork:
    """The work of rows of one token, with new memory for partial results."""
    partial, partial_lse = partials(len(pieces[1]), heads, pool)
    return DecodeWork(
        contexts=contexts,
        tables=tables,
        table_start=table_start,
        piece=pieces[0],
        work_row=pieces[1],
        work_start=pieces[2],
        row_work=pieces[3],
        arrived=arrived(len(contexts), pool),
        partial=partial,
        partial_lse=partial_lse,
    )


def arrived(num_rows: int, pool: KVPool) -> Tensor:
    """Counters of pieces, set to zero."""
    return torch.zeros((num_rows, pool.kv_heads), dtype=torch.int32, device=pool.device)


def partials(num_entries: int, heads: int, pool: KVPool) -> tuple[Tensor, Tensor]:
    """Memory for this many partial results."""
    shape = (num_entries, heads, pool.head_dim)
    partial = torch.empty(shape, dtype=torch.float32, device=pool.device)
    return partial, torch.empty(shape[:2], dtype=torch.float32, device=pool.device)
