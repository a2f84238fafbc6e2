"""Contiguous copies of the KV of sequences that decode on a CPU.

Attention through block tables would copy every block of every sequence in every step. A
buffer holds one sequence's KV as plain matrices, gets one token per step, and is read in place.

keys, values   [layers, buffers * kv_heads, buffer_tokens, head_dim]; one matrix if the pool has
one plane

A buffer is used only while it is provably valid: the same slots, the expected number of tokens,
and no write to any of these slots since (`KVPool.writes`). Otherwise it is filled again from
the pool, to which every token is also written.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.device import pages
from headwater.device.kv import Ints, KVPool
from headwater.types import RequestId

_MIN_BUFFER_TOKENS = 256
"""Minimum number of tokens in a buffer."""

_ALONE = 2.5
"""Cost of attending to one token outside a buffer, whose block must be copied first. The unit
of costs is one token in a buffer."""

_ALONE_ROW = 256
"""Additional cost of a sequence that is attended alone."""

Rows = NDArray[np.int64]


class ContiguousKV:
    """Assigns buffers to sequences, and owns the matrices."""

    def __init__(self, pool: KVPool, *, max_buffers: int, max_bytes: int) -> None:
        self._pool = pool
        self._max_buffers = max_buffers
        numbers = pool.planes * pool.num_layers * pool.kv_heads * pool.head_dim
        token_bytes = numbers * pool.dtype.itemsize
        self._max_tokens = max_bytes // (token_bytes * pool.block_tokens) * pool.block_tokens
        self._buffer_of: dict[RequestId, int] = {}
        self.buffer_tokens = 0
        self.num_buffers = 0
        self._allocate(0, 0)

    def choose(self, contexts: Ints) -> NDArray[np.bool_]:
        """The sequences to attend together; the others are cheaper alone or do not fit.

        In a batched product each sequence costs as much as the longest one, so a long sequence
        among many short ones is left out.
        """
        order = np.argsort(contexts, kind="stable")
        ascending = contexts[order]
        count = np.arange(1, len(contexts) + 1)
        alone = _ALONE * ascending + _ALONE_ROW
        cost = count * ascending - np.cumsum(alone)
        fits = (count <= self._max_buffers) & (
            count * _buffer_tokens(ascending) <= self._max_tokens
        )
        cost = np.where(fits, cost, np.inf)
        best = int(np.argmin(cost))
        chosen = np.zeros(len(contexts), dtype=bool)
        if cost[best] < 0:
            chosen[order[: best + 1]] = True
        return chosen

    def place(
        self,
        ids: Sequence[RequestId],
        tables: NDArray[np.int64],
        contexts: Ints,
        *,
        shared_blocks: int = 0,
    ) -> tuple[Rows, int]:
        """A buffer for each sequence with its KV before this step's token, and the end of the
        used buffers.

        `tables` is padded to one width. Buffers of sequences that are not given are released.
        Only the buffer of the first sequence is sure to contain the `shared_blocks`, until
        `complete` is called.
        """
        self._make_room(len(ids), int(contexts.max()))
        buffers = np.array([self._buffer_of.get(name, -1) for name in ids], dtype=np.int64)
        # Unused buffers in between are attended too, so a sequence at a high index is moved
        # when many have left.
        buffers[buffers >= len(ids) + len(ids) // 4] = -1
        buffers[~self._holds(buffers, tables, contexts)] = -1
        taken = set(buffers.tolist())
        vacant = (buffer for buffer in range(self.num_buffers) if buffer not in taken)
        first_blocks = np.full(len(ids), shared_blocks, dtype=np.int64)
        first_blocks[0] = 0
        for row in np.flatnonzero(buffers < 0).tolist():
            buffers[row] = next(vacant)
            first = int(first_blocks[row])
            self._fill(int(buffers[row]), tables[row], int(contexts[row]) - 1, first)
        self.complete(buffers[self._first[buffers] > first_blocks])
        self._buffer_of = dict(zip(ids, buffers.tolist(), strict=True))
        return buffers, int(buffers.max()) + 1

    def advance(self, buffers: Rows, tables: NDArray[np.int64], contexts: Ints) -> None:
        """Record that each buffer has this step's token, or will have it. The caller has marked
        the token's slot in the pool as written."""
        last = (contexts - 1) // self._pool.block_tokens
        slots = tables[np.arange(len(buffers)), last]
        self._held[buffers] = contexts
        self._slots[buffers, last] = slots
        self._writes[buffers, last] = self._pool.writes[slots]

    def _holds(
        self, buffers: Rows, tables: NDArray[np.int64], contexts: Ints
    ) -> NDArray[np.bool_]:
        """Whether each buffer provably has its sequence's KV before this step."""
        width = tables.shape[1]
        blocks = -(-(contexts - 1) // self._pool.block_tokens)
        same = self._slots[buffers, :width] == tables
        same &= self._writes[buffers, :width] == self._pool.writes[tables]
        same |= np.arange(width) >= blocks[:, None]
        held: NDArray[np.bool_] = same.all(axis=1) & (self._held[buffers] == contexts - 1)
        return held & (buffers >= 0)

    def complete(self, buffers: Rows) -> None:
        """Make sure that these buffers have their sequences from the first block on."""
        for buffer in buffers[self._first[buffers] > 0].tolist():
            self._read(buffer, 0, int(self._first[buffer]))
            self._first[buffer] = 0

    def _fill(
        self, buffer: int, table: NDArray[np.int64], num_tokens: int, first_block: int
    ) -> None:
        """Copy a sequence's KV from `first_block` on into a buffer."""
        pool = self._pool
        blocks = -(-num_tokens // pool.block_tokens)
        slots = table[:blocks]
        self._held[buffer] = num_tokens
        self._slots[buffer, :blocks] = slots
        self._writes[buffer, :blocks] = pool.writes[slots]
        self._first[buffer] = first_block
        if first_block < blocks:
            self._read(buffer, first_block, blocks)

    def _read(self, buffer: int, start: int, end: int) -> None:
        """Copy blocks `[start, end)` of the buffer's sequence from the pool."""
        pool = self._pool
        slots = torch.from_numpy(self._slots[buffer, start:end]).to(pool.device)
        whole = pool.read_whole(slots)
        heads = slice(buffer * pool.kv_heads, (buffer + 1) * pool.kv_heads)
        tokens = slice(start * pool.block_tokens, end * pool.block_tokens)
        for part, target in enumerate((self.keys, self.values)[: pool.planes]):
            buffer_part = target[:, heads, tokens]
            by_block = buffer_part.view(*buffer_part.shape[:2], end - start, -1, pool.head_dim)
            by_block.copy_(whole[:, :, part].permute(1, 3, 0, 2, 4))

    def _make_room(self, num_buffers: int, num_tokens: int) -> None:
        """Make enough buffers of sufficient length; a change empties all buffers."""
        buffer_tokens = int(_buffer_tokens(np.array([num_tokens]))[0])
        if num_buffers <= self.num_buffers and buffer_tokens <= self.buffer_tokens:
            return
        self._allocate(min(self._max_buffers, self._max_tokens // buffer_tokens), buffer_tokens)

    def _allocate(self, num_buffers: int, buffer_tokens: int) -> None:
        pool = self._pool
        whole_blocks = -(-buffer_tokens // pool.block_tokens)
        self.num_buffers = num_buffers
        self.buffer_tokens = whole_blocks * pool.block_tokens
        shape = (
            pool.num_layers,
            num_buffers * pool.kv_heads,
            self.buffer_tokens,
            pool.head_dim,
        )
        # Release the old buffers first: both together may exceed the memory.
        self.keys = self.values = torch.empty(0)
        self.keys = pages.zeros(shape, dtype=pool.dtype, device=pool.device)
        self.values = self.keys
        if pool.planes > 1:
            self.values = pages.zeros(shape, dtype=pool.dtype, device=pool.device)
        rows = max(num_buffers, 1)  # buffer -1, which means "none", must be readable
        self._held = np.zeros(rows, dtype=np.int64)
        self._first = np.zeros(rows, dtype=np.int64)
        self._slots = np.zeros((rows, whole_blocks), dtype=np.int64)
        self._writes = np.zeros((rows, whole_blocks), dtype=np.int64)
        self._buffer_of = {}


def _buffer_tokens(contexts: Ints) -> Ints:
    """Buffer size for a sequence of this many tokens: with room to grow, in steps 2, 3, 4, 6, 8
    …"""
    wanted = np.maximum(contexts + contexts // 8, _MIN_BUFFER_TOKENS)
    whole = 2 ** np.ceil(np.log2(wanted))
    step = np.where(wanted <= whole * 0.75, whole * 0.75, whole)
    return np.asarray(step, dtype=np.int64)
