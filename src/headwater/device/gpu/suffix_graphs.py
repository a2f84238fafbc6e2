"""Steps of one short chunk as captured graphs: a few new tokens after a long cached prefix.

Launching the kernels of such a step one by one takes the host several times as long as the
device. A chunk with fewer tokens runs in the next larger graph. The unused tokens have no slot,
and attention does not see them.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.device.gpu.attention import PagedAttention
from headwater.device.gpu.decoder import FusedDecoder, RowsToCompute, TokenSlots
from headwater.device.gpu.inputs import Layout, arrived, partials
from headwater.device.gpu.staging import Staging
from headwater.device.gpu.work import (
    MAX_PARTS,
    PART_STEP,
    PIECE_STEP,
    num_entries,
    num_parts_of,
    split_contexts,
)
from headwater.device.kernels.greedy import choose_greedy
from headwater.device.kernels.ints import copy_ints
from headwater.device.kernels.pieces import DecodeWork
from headwater.device.kernels.prefill import takes_pairs
from headwater.device.kernels.tiles import ChunkWork, tile_queries
from headwater.device.kv import KVPool

_SIZES = (16, 64)
"""Numbers of tokens that get a graph."""

_SCALARS = ("logits_at", "context", "query_start", "zero", "part_keys", "piece", "work_begin")
_LONG = np.array([1 << 20])
"""A context so long that it is cut into the maximum number of parts. A graph is captured with
that number; for a shorter context, some parts have no keys."""

_ALIGN = 16
"""Every array begins at a multiple of this many integers, so that kernels are compiled for this
alignment only."""


class SuffixGraphs:
    """Graphs over one decoder and pool, for steps of one chunk."""

    def __init__(
        self,
        decoder: FusedDecoder,
        pool: KVPool,
        chosen: Tensor,
        logits: Tensor,
        *,
        max_table: int,
    ) -> None:
        """`chosen` and `logits` get the chunk's token and logits, in their first rows."""
        self._decoder, self._pool, self._chosen = decoder, pool, chosen
        self.logits = logits
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory: Any = None
        self._start: dict[str, int] = {}
        end = 0
        sizes = [(name, _SIZES[-1]) for name in ("tokens", "carry", "positions", "slots")]
        sizes += [(name, num_entries(1, pool.kv_heads)) for name in ("work_row", "work_start")]
        sizes += [(name, _ALIGN) for name in _SCALARS]
        for name, size in sizes:
            self._start[name] = end
            end += -(-size // _ALIGN) * _ALIGN
        self._header = end
        self._inputs = torch.zeros(end + max_table, dtype=torch.int32, device=pool.device)
        self._staging = Staging(end + max_table, num_buffers=3)
        heads, tile = decoder.heads, self._tile
        self._num_parts = MAX_PARTS
        if takes_pairs(pool.data, heads, tile):
            self._num_parts = num_parts_of(heads, _LONG, has_pairs=True)
        self._chunk_partials = partials(self._num_parts * tile, heads, pool)
        self._row_partials = partials(num_entries(1, pool.kv_heads), heads, pool)
        self._arrived = arrived(1, pool)

    @property
    def _tile(self) -> int:
        return tile_queries(self._pool.dtype, self._pool.head_dim, _SIZES[-1])

    def takes(self, layout: Layout) -> bool:
        """Whether the step is one short chunk whose last token is sampled."""
        batch = layout.batch
        fits = self._tile >= _SIZES[-1] and batch.num_rows == 1
        fits = fits and not batch.awaits and not batch.scored
        return fits and len(batch.sampled) == 1 and 1 < int(layout.counts[0]) <= _SIZES[-1]

    def warm(self) -> None:
        """Capture every size."""
        for size in _SIZES if self._tile >= _SIZES[-1] else ():
            if size not in self._graphs:
                self._graphs[size] = self._capture(size)

    def run(self, layout: Layout) -> Tensor:
        """Compute a step. Returns the logits of its last token, valid until the next step."""
        size = next(size for size in _SIZES if size >= int(layout.counts[0]))
        if size not in self._graphs:
            self.warm()
        self._fill(layout, size)
        self._graphs[size].replay()
        return self.logits[:1]

    def _fill(self, layout: Layout, size: int) -> None:
        batch, count = layout.batch, int(layout.counts[0])
        context = int(layout.contexts[0])
        used = self._header + len(layout.tables)
        pinned, view = self._staging.take(used)
        pieces = split_contexts(layout.contexts, 1, self._pool.kv_heads)
        for name, values, absent in (
            ("tokens", batch.tokens, 0),
            ("carry", np.full(count, -1), -1),
            ("positions", batch.positions, 0),
            ("slots", layout.slots, -1),
            ("work_row", pieces.work_row, -1),
            ("work_start", pieces.work_start, 0),
        ):
            start = self._start[name]
            room = max(size, len(values))
            view[start : start + len(values)] = values
            view[start + len(values) : start + room] = absent
        part_keys = -(-context // (self._num_parts * PART_STEP)) * PART_STEP
        for name, value in (
            ("logits_at", count - 1),
            ("context", context),
            ("query_start", 0),
            ("zero", 0),
            ("part_keys", part_keys),
            ("piece", pieces.piece),
        ):
            view[self._start[name]] = value
        # Two entries: where the row begins and where it ends.
        view[self._start["query_start"] + 1] = count
        begin = self._start["work_begin"]
        view[begin : begin + 2] = pieces.row_work
        view[self._header : used] = layout.tables
        copy_ints(pinned[:used], self._inputs)

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        before = self._chosen.clone()
        self._inputs.zero_()
        for name in ("carry", "slots"):
            self._view(name, size).fill_(-1)
        self._view("work_row", num_entries(1, self._pool.kv_heads)).fill_(-1)
        for name, value in (("context", 1), ("part_keys", PART_STEP), ("piece", PIECE_STEP)):
            self._view(name, 1).fill_(value)
        graph = torch.cuda.CUDAGraph()
        self._step(size)  # compiles the kernels, which is not possible during a capture
        torch.cuda.synchronize(self._pool.device)
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._step(size)
        self._memory = graph.pool()
        self._chosen.copy_(before)
        return graph

    def _step(self, size: int) -> None:
        decoder, pool = self._decoder, self._pool
        tables, zero = self._inputs[self._header :], self._view("zero", 1)
        attention = PagedAttention(
            pool=pool.data,
            heads=decoder.heads,
            value_dim=pool.value_dim,
            chunks=ChunkWork(
                contexts=self._view("context", 1),
                query_start=self._view("query_start", 2),
                tables=tables,
                table_start=zero,
                tile=self._tile,
                tile_row=zero,
                tile_start=zero,
                longest_context=0,
                num_parts=self._num_parts,
                part_keys=self._view("part_keys", 1),
                partial=self._chunk_partials[0],
                partial_lse=self._chunk_partials[1],
            ),
            sampled=DecodeWork(
                contexts=self._view("context", 1),
                tables=tables,
                table_start=zero,
                piece=self._view("piece", 1),
                work_row=self._view("work_row", num_entries(1, pool.kv_heads)),
                work_start=self._view("work_start", num_entries(1, pool.kv_heads)),
                row_work=self._view("work_begin", 2),
                arrived=self._arrived,
                partial=self._row_partials[0],
                partial_lse=self._row_partials[1],
            ),
        )
        places = TokenSlots(self._view("positions", size), self._view("slots", size))
        tokens, carry = self._view("tokens", size), self._view("carry", size)
        hidden = decoder.run(
            decoder.embed(tokens, carry, self._chosen),
            places,
            pool.data,
            attention.attend,
            wanted=RowsToCompute(self._view("logits_at", 1), attention.attend_sampled),
        )
        choose_greedy(decoder.logits(hidden, out=self.logits[:1]), self._chosen)

    def _view(self, name: str, size: int) -> Tensor:
        start = self._start[name]
        return self._inputs[start : start + size]
