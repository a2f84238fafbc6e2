"""Lanes: a second, contiguous copy of the KV of sequences that are decoding on a CPU.

Attention through block tables would copy every block of every sequence in every step. A
lane holds one sequence's KV as plain matrices, gets one token a step, and is read in place.

    keys, values   [layers, lanes * kv_heads, lane_tokens, head_dim]

A lane is trusted only while it can be proved: the same slots, as many tokens as expected,
and no write to any of those slots since (`KVPool.writes`). Otherwise it is filled again
from the pool, which stays the truth: every token is written there too.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.device import pages
from headwater.device.kv import Ints, KVPool
from headwater.types import RequestId

_LANE_TOKENS = 256
"""Least tokens in a lane."""

_ALONE = 2.5
"""Cost of attending one token outside a lane, where its block is copied first."""

_ALONE_ROW = 256
"""Cost of attending a sequence by itself, in tokens."""

Rows = NDArray[np.int64]


class ContiguousKV:
    """Which lane holds which sequence, and the matrices themselves."""

    def __init__(self, pool: KVPool, *, max_lanes: int, max_bytes: int) -> None:
        self._pool = pool
        self._max_lanes = max_lanes
        self._max_tokens = max_bytes // (pool.num_bytes // pool.num_blocks) * pool.block_tokens
        self._lane_of: dict[RequestId, int] = {}
        self.lane_tokens = 0
        self.num_lanes = 0
        self._allocate(0, 0)

    def choose(self, contexts: Ints) -> NDArray[np.bool_]:
        """Which sequences to attend together; the others are cheaper alone, or do not fit.

        Together they cost as much as the longest, each: one long sequence among many
        short ones is better left out.
        """
        order = np.argsort(contexts, kind="stable")
        ascending = contexts[order]
        count = np.arange(1, len(contexts) + 1)
        alone = _ALONE * ascending + _ALONE_ROW
        cost = count * ascending - np.cumsum(alone)
        fits = (count <= self._max_lanes) & (
            count * _lane_tokens(ascending) <= self._max_tokens
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
        """A lane for each sequence, holding its KV up to this step's token; and their end.

        `tables` is padded to one width. Lanes of sequences not named here are given up. The
        `shared_blocks` that all begin with are in the lane of the first only, unless they
        happen to be in others too, until `complete` is called.
        """
        self._make_room(len(ids), int(contexts.max()))
        lanes = np.array([self._lane_of.get(name, -1) for name in ids], dtype=np.int64)
        # Holes are attended too, so a sequence far out moves in when many have left.
        lanes[lanes >= len(ids) + len(ids) // 4] = -1
        lanes[~self._holds(lanes, tables, contexts)] = -1
        taken = set(lanes.tolist())
        vacant = (lane for lane in range(self.num_lanes) if lane not in taken)
        first_blocks = np.full(len(ids), shared_blocks, dtype=np.int64)
        first_blocks[0] = 0
        for row in np.flatnonzero(lanes < 0).tolist():
            lanes[row] = next(vacant)
            first = int(first_blocks[row])
            self._fill(int(lanes[row]), tables[row], int(contexts[row]) - 1, first)
        self.complete(lanes[self._first[lanes] > first_blocks])
        self._lane_of = dict(zip(ids, lanes.tolist(), strict=True))
        return lanes, int(lanes.max()) + 1

    def advance(self, lanes: Rows, tables: NDArray[np.int64], contexts: Ints) -> None:
        """This step's token is (about to be) in each lane, and marked written in the pool."""
        last = (contexts - 1) // self._pool.block_tokens
        slots = tables[np.arange(len(lanes)), last]
        self._held[lanes] = contexts
        self._slots[lanes, last] = slots
        self._writes[lanes, last] = self._pool.writes[slots]

    def _holds(
        self, lanes: Rows, tables: NDArray[np.int64], contexts: Ints
    ) -> NDArray[np.bool_]:
        """Whether each lane provably has its sequence's KV before this step."""
        width = tables.shape[1]
        blocks = -(-(contexts - 1) // self._pool.block_tokens)
        same = self._slots[lanes, :width] == tables
        same &= self._writes[lanes, :width] == self._pool.writes[tables]
        same |= np.arange(width) >= blocks[:, None]
        held: NDArray[np.bool_] = same.all(axis=1) & (self._held[lanes] == contexts - 1)
        return held & (lanes >= 0)

    def complete(self, lanes: Rows) -> None:
        """See that these lanes hold their sequences from the first block on."""
        for lane in lanes[self._first[lanes] > 0].tolist():
            self._read(lane, 0, int(self._first[lane]))
            self._first[lane] = 0

    def _fill(
        self, lane: int, table: NDArray[np.int64], num_tokens: int, first_block: int
    ) -> None:
        """Put a sequence's KV from `first_block` on in a lane."""
        pool = self._pool
        blocks = -(-num_tokens // pool.block_tokens)
        slots = table[:blocks]
        self._held[lane] = num_tokens
        self._slots[lane, :blocks] = slots
        self._writes[lane, :blocks] = pool.writes[slots]
        self._first[lane] = first_block
        if first_block < blocks:
            self._read(lane, first_block, blocks)

    def _read(self, lane: int, start: int, end: int) -> None:
        """Copy blocks `[start, end)` of the lane's sequence from the pool."""
        pool = self._pool
        slots = torch.from_numpy(self._slots[lane, start:end]).to(pool.device)
        whole = pool.read_whole(slots)
        heads = slice(lane * pool.kv_heads, (lane + 1) * pool.kv_heads)
        tokens = slice(start * pool.block_tokens, end * pool.block_tokens)
        for part, target in enumerate((self.keys, self.values)):
            lane_part = target[:, heads, tokens]
            by_block = lane_part.view(*lane_part.shape[:2], end - start, -1, pool.head_dim)
            by_block.copy_(whole[:, :, part].permute(1, 3, 0, 2, 4))

    def _make_room(self, num_lanes: int, num_tokens: int) -> None:
        """Enough lanes, long enough; all are empty after a change."""
        lane_tokens = int(_lane_tokens(np.array([num_tokens]))[0])
        if num_lanes <= self.num_lanes and lane_tokens <= self.lane_tokens:
            return
        self._allocate(min(self._max_lanes, self._max_tokens // lane_tokens), lane_tokens)

    def _allocate(self, num_lanes: int, lane_tokens: int) -> None:
        pool = self._pool
        whole_blocks = -(-lane_tokens // pool.block_tokens)
        self.num_lanes = num_lanes
        self.lane_tokens = whole_blocks * pool.block_tokens
        shape = (pool.num_layers, num_lanes * pool.kv_heads, self.lane_tokens, pool.head_dim)
        # Let go of the old ones first: both together may be more than there is.
        self.keys = self.values = torch.empty(0)
        self.keys = pages.zeros(shape, dtype=pool.data.dtype, device=pool.device)
        self.values = pages.zeros(shape, dtype=pool.data.dtype, device=pool.device)
        rows = max(num_lanes, 1)  # lane -1, which means none, must be readable
        self._held = np.zeros(rows, dtype=np.int64)
        self._first = np.zeros(rows, dtype=np.int64)
        self._slots = np.zeros((rows, whole_blocks), dtype=np.int64)
        self._writes = np.zeros((rows, whole_blocks), dtype=np.int64)
        self._lane_of = {}


def _lane_tokens(contexts: Ints) -> Ints:
    """Lane size for a sequence of this many tokens: room to grow, in steps 2, 3, 4, 6, 8 …"""
    wanted = np.maximum(contexts + contexts // 8, _LANE_TOKENS)
    whole = 2 ** np.ceil(np.log2(wanted))
    step = np.where(wanted <= whole * 0.75, whole * 0.75, whole)
    return np.asarray(step, dtype=np.int64)
