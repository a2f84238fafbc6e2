"""Decode steps as captured graphs, one for each batch-size bucket. Steps with short chunks of
prompts run in them too, each token as a row.

A step with fewer rows runs in the next larger graph; the unused rows attend to nothing and
store nothing. Inputs have fixed addresses on the device, which one kernel fills in each step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headwater.device.gpu.attention import PagedAttention
from headwater.device.gpu.decoder import FusedDecoder, TokenSlots
from headwater.device.gpu.inputs import GraphRows, Layout, arrived, partials
from headwater.device.gpu.staging import Staging
from headwater.device.gpu.work import num_entries, split_contexts
from headwater.device.kernels.greedy import choose_greedy
from headwater.device.kernels.ints import copy_ints
from headwater.device.kernels.pieces import DecodeWork
from headwater.device.kv import Ints, KVPool
from headwater.scheduler.batch import IntArray
from headwater.scheduler.pacing import GRAPH_CHUNK_KEYS, GRAPH_CHUNK_TOKENS

_ALIGN = 16
"""Sections begin at multiples of this many integers."""

_LT_ROWS = range(17, 65)
"""Numbers of rows for which cuBLASLt is faster than cuBLAS: 3 % of a step of 32 rows on an
H200."""


def batch_size_buckets(max_rows: int) -> list[int]:
    """Batch sizes that get a graph: close together where one more row costs most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 32, 32)]
    return [*(size for size in sizes if size < max_rows), max_rows]


@contextmanager
def _products(num_rows: int) -> Iterator[None]:
    """Use the faster library for products of this many rows while a graph is captured."""
    prefer = torch.backends.cuda.preferred_blas_library
    before = prefer()
    if num_rows in _LT_ROWS:
        prefer("cublaslt")
    try:
        yield
    finally:
        prefer(before)


class _Section:
    """A named run of integers in the input buffer."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size


class DecodeGraphs:
    """Graphs for one decoder and pool. A graph is captured when its size is first needed."""

    def __init__(
        self,
        decoder: FusedDecoder,
        pool: KVPool,
        chosen: Tensor,
        *,
        max_rows: int,
        max_table: int,
    ) -> None:
        """`chosen` holds the tokens of the previous step, and then those of this one.
        `max_table` is the maximum number of slots of one row."""
        self._decoder, self._pool, self._chosen = decoder, pool, chosen
        self.sizes = batch_size_buckets(max_rows)
        """Batch sizes that have a graph, ascending."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory: Any = None
        entries = num_entries(max_rows, pool.kv_heads)
        self._sections: dict[str, _Section] = {}
        self._header = 0
        for name in ("tokens", "carry", "positions", "slots", "contexts", "table_start"):
            self._add(name, max_rows)
        for name, size in (("piece", 1), ("work_row", entries), ("work_start", entries)):
            self._add(name, size)
        self._add("row_work", max_rows + 1)
        num_ints = self._header + max_rows * max_table
        self._inputs = torch.zeros(num_ints, dtype=torch.int32, device=pool.device)
        self._staging = Staging(num_ints, num_buffers=3)
        vocab = decoder.vocab_size
        self.logits = torch.empty((max_rows, vocab), dtype=pool.dtype, device=pool.device)
        self._partials = partials(entries, decoder.heads, pool)
        self._arrived = arrived(max_rows, pool)

    def warm(self, sizes: list[int] | None = None) -> None:
        """Capture now what would be captured at first use; by default every size."""
        for size in self.sizes if sizes is None else sizes:
            if size not in self._graphs:
                self._graphs[size] = self._capture(size)

    def warm_up_to(self, num_rows: int) -> None:
        """Capture every size that steps of at most this many rows use."""
        largest = self.size_for(num_rows)
        self.warm([size for size in self.sizes if size <= largest])

    def size_for(self, num_rows: int) -> int:
        """The size of the graph for this many rows."""
        return next(size for size in self.sizes if size >= num_rows)

    def takes(self, layout: Layout) -> bool:
        """Whether the step only decodes, or has chunks so short that their tokens are computed
        as decode rows: launching the kernels of a chunk one by one would take the host longer
        than the device needs for them."""
        batch = layout.batch
        if batch.awaits or batch.scored:
            return False
        if layout.is_decode:
            return True
        # With 8-bit KV, the tokens of chunks are not computed as decode rows.
        has_scales = bool(self._pool.layout.scale_bytes)
        num_chunk_tokens = len(batch.tokens) - layout.num_decodes
        return (
            not has_scales
            and num_chunk_tokens <= GRAPH_CHUNK_TOKENS
            and len(batch.tokens) <= self.sizes[-1]
            and layout.num_chunk_keys <= GRAPH_CHUNK_KEYS
        )

    def run(self, rows: GraphRows) -> Tensor:
        """Compute a step. Returns its logits, one row each, valid until the next step. `chosen`
        gets the greedy tokens."""
        num_rows = len(rows.tokens)
        size = self.size_for(num_rows)
        self.warm([size])
        self._fill(rows, size)
        self._graphs[size].replay()
        return self.logits[:num_rows]

    def project(self, hidden: Tensor) -> Tensor:
        """Logits of the sampled rows of a step outside the graphs, in the memory of `logits`.
        With new memory for each step, hundreds of megabytes, the allocator would sometimes free
        other memory, and that waits for the device."""
        return self._decoder.logits(hidden, out=self.logits[: len(hidden)])

    def _add(self, name: str, size: int) -> None:
        self._sections[name] = _Section(self._header, size)
        self._header += -(-size // _ALIGN) * _ALIGN

    def _fill(self, rows: GraphRows, size: int) -> None:
        num_rows = len(rows.tokens)
        used = self._header + len(rows.tables)
        pinned, view = self._staging.take(used)
        pieces = split_contexts(rows.contexts, size, self._pool.kv_heads)
        absent = {"carry": -1, "slots": -1}
        given: dict[str, Ints | IntArray] = {
            "tokens": rows.tokens,
            "carry": rows.carry,
            "positions": rows.positions,
            "slots": rows.slots,
            "contexts": rows.contexts,
            "table_start": rows.table_start,
        }
        for name, values in given.items():
            start = self._sections[name].start
            view[start : start + num_rows] = values
            view[start + num_rows : start + size] = absent.get(name, 0)
        view[self._sections["piece"].start] = pieces.piece
        for name, values in zip(
            ("work_row", "work_start", "row_work"), pieces[1:], strict=True
        ):
            start = self._sections[name].start
            view[start : start + len(values)] = values
        view[self._header : used] = rows.tables
        copy_ints(pinned[:used], self._inputs)

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        # A first run compiles and loads kernels, which cannot be part of a capture.
        before = self._chosen.clone()
        self._inputs.zero_()
        for name in ("carry", "slots"):
            self._view(name, size).fill_(-1)
        self._view("work_row", num_entries(size, self._pool.kv_heads)).fill_(-1)
        graph = torch.cuda.CUDAGraph()
        with _products(size):
            self._step(size)
            torch.cuda.synchronize(self._pool.device)
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                self._step(size)
        self._memory = graph.pool()
        self._chosen.copy_(before)
        return graph

    def _step(self, size: int) -> None:
        decoder = self._decoder
        entries = num_entries(size, self._pool.kv_heads)
        work = DecodeWork(
            contexts=self._view("contexts", size),
            tables=self._inputs[self._header :],
            table_start=self._view("table_start", size),
            piece=self._view("piece", 1),
            work_row=self._view("work_row", entries),
            work_start=self._view("work_start", entries),
            row_work=self._view("row_work", size + 1),
            arrived=self._arrived,
            partial=self._partials[0],
            partial_lse=self._partials[1],
        )
        attention = PagedAttention(
            pool=self._pool.data,
            heads=decoder.heads,
            value_dim=self._pool.value_dim,
            num_decodes=size,
            decodes=work,
        )
        places = TokenSlots(self._view("positions", size), self._view("slots", size))
        tokens, carry = self._view("tokens", size), self._view("carry", size)
        hidden = decoder.embed(tokens, carry, self._chosen)
        hidden = decoder.run(hidden, places, self._pool.data, attention.attend)
        logits = decoder.logits(hidden, out=self.logits[:size])
        choose_greedy(logits, self._chosen)

    def _view(self, name: str, size: int) -> Tensor:
        start = self._sections[name].start
        return self._inputs[start : start + size]
