"""Prefill attention of a short chunk after a long prefix, for Hopper, as in `prefill_hopper`.

A chunk of at most 64 queries fills only half of a tile. So a tile is made of two heads that share
keys and values, one for each computing group of warps. There are few such tiles, so keys are cut
into parts, and `prefill` joins the partial results.

    parts of keys      0 … 4223 | 4224 … 8447 | …
    a program          heads 0 and 1 of a tile of queries, over one part
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headwater.device.attention.base import Variant
from headwater.device.kernels.hopper_tiles import (
    ALL_REGISTERS,
    GROUP_QUERIES,
    PAGE_KEYS,
    REGISTERS,
    STAGES,
    TILE_KEYS,
    TYPES,
    load_tile,
    next_tile,
    softmax_tile,
    zero_tail,
)
from headwater.device.kernels.ring import await_filled, leave, make_ring
from headwater.device.kernels.tiles import ChunkWork


class _Lists(NamedTuple):
    """The work: fields of `ChunkWork`, the number of items, of iterations of a program, and of
    parts of a tile."""

    contexts: Any
    query_start: Any
    table_start: Any
    tile_row: Any
    tile_start: Any
    part_keys: Any
    items: Any
    turns: Any
    parts: Any


class _Item(NamedTuple):
    """A part of the keys of a tile of queries of two heads. The tile's first query has the
    index `token` in the batch and `first` in its row. The part has the keys `[begin, end)`, or
    none."""

    exists: Any
    has_keys: Any
    head: Any
    place: Any
    token: Any
    context: Any
    first: Any
    begin: Any
    end: Any
    table: Any


@gluon.jit
def _take(turn, lists, HEADS: gl.constexpr):
    """The item of this program in an iteration. Pairs of heads that share keys follow each
    other."""
    number = turn * gl.num_programs(0) + gl.program_id(0)
    exists = number < lists.items
    number = gl.minimum(number, lists.items - 1)
    pairs: gl.constexpr = HEADS // 2
    head = number % pairs * 2
    place = number // pairs
    tile = place // lists.parts
    row = gl.load(lists.tile_row + tile)
    start = gl.load(lists.tile_start + tile)
    packed = gl.load(lists.query_start + row)
    count = gl.load(lists.query_start + row + 1) - packed
    context = gl.load(lists.contexts + row)
    first = context - count + start
    size = gl.load(lists.part_keys + tile)
    begin = place % lists.parts * size
    end = begin + size
    # The part with the first query's own key also gets the keys of the later queries. So every
    # query sees the first key of every part, and no part is empty for a query.
    if end > first:
        end = gl.minimum(context, first + GROUP_QUERIES)
    table = gl.load(lists.table_start + row)
    has_keys = exists & (begin <= first)
    return _Item(
        exists, has_keys, head, place, packed + start, context, first, begin, end, table
    )


@gluon.jit
def _load(queries, pool, q, k, v, lists, tables, block_rows, layer_row, HEADS: gl.constexpr,
          KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr):  # fmt: skip
    """Load the queries of each item, then its keys and values, as soon as a buffer is free."""
    done = 0
    used = 0
    for turn in range(lists.turns):
        item = _take(turn, lists, HEADS)
        if item.has_keys:
            for which in gl.static_range(2):
                mbarrier.wait(q.empty.index(which), (used & 1) ^ 1)
                mbarrier.expect(q.ready.index(which), queries.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    queries, [item.token, (item.head + which) * DIM], q.ready.index(which),
                    q.buffers.index(which),
                )  # fmt: skip
            used += 1
            # After the last page none follows: the last one is loaded again, and no query sees
            # it there.
            last = (item.context - 1) // PAGE_KEYS * PAGE_KEYS
            column = item.head // (HEADS // KV_HEADS) * DIM
            # Slots are read one tile ahead.
            after = gl.minimum(item.begin + PAGE_KEYS, last)
            slot = gl.load(tables + item.table + item.begin // BLOCK_TOKENS)
            slot_2 = gl.load(tables + item.table + after // BLOCK_TOKENS)
            for key in range(item.begin, item.end, TILE_KEYS):
                page_2 = gl.minimum(key + PAGE_KEYS, last)
                line = slot * block_rows + layer_row + key % BLOCK_TOKENS
                line_2 = slot_2 * block_rows + layer_row + page_2 % BLOCK_TOKENS
                after = gl.minimum(key + TILE_KEYS, last)
                slot = gl.load(tables + item.table + after // BLOCK_TOKENS)
                after = gl.minimum(key + TILE_KEYS + PAGE_KEYS, last)
                slot_2 = gl.load(tables + item.table + after // BLOCK_TOKENS)
                load_tile(pool, line, line_2, column, k, done)
                load_tile(pool, line + BLOCK_TOKENS, line_2 + BLOCK_TOKENS, column, v, done)
                done += 1


@gluon.jit
def _leave_result(partial, partial_lse, item, result, level, HEADS: gl.constexpr,
                  DIM: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Store the result of one head of an item."""
    layout: gl.constexpr = result.type.layout
    query = gl.arange(0, GROUP_QUERIES, layout=gl.SliceLayout(1, layout))
    number = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    lines = (item.place * GROUP_QUERIES + query) * HEADS + item.head + WHICH
    gl.store(partial + lines.to(gl.int64)[:, None] * DIM + number[None, :], result)
    gl.store(partial_lse + lines, level)


@gluon.jit
def _compute(partial, partial_lse, q, k, v, clean, lists, scale, HEADS: gl.constexpr,
             DIM: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Attend one of the two heads of each item."""
    dtype: gl.constexpr = q.buffers.dtype
    by_key: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_KEYS, 16]
    )
    by_value: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16]
    )
    of_query: gl.constexpr = gl.DotOperandLayout(0, by_key, k_width=2)
    of_weight: gl.constexpr = gl.DotOperandLayout(0, by_value, k_width=2)
    rows: gl.constexpr = gl.SliceLayout(1, by_value)
    key = gl.arange(0, TILE_KEYS, layout=gl.SliceLayout(0, by_key))
    unused = gl.zeros((GROUP_QUERIES, TILE_KEYS), gl.float32, layout=by_key)
    done = 0
    used = 0
    cleaned = 0
    for turn in range(lists.turns):
        item = _take(turn, lists, HEADS)
        if item.has_keys:
            at = item.first + gl.arange(0, GROUP_QUERIES, layout=gl.SliceLayout(1, by_key))
            first_tile = item.begin // TILE_KEYS
            tiles = gl.cdiv(item.end, TILE_KEYS)
            # The first tile of keys is masked in any case. The next ones, up to this one, need no
            # mask: every query sees all their keys.
            plain = gl.maximum((item.first + 1) // TILE_KEYS, first_tile + 1)
            plain = gl.minimum(plain, tiles)
            mbarrier.wait(q.ready.index(WHICH), used & 1)
            query = q.buffers.index(WHICH).load(of_query)
            fence_async_shared()
            mbarrier.arrive(q.empty.index(WHICH), count=1)
            used += 1
            keys = await_filled(k, done)
            scores = warpgroup_mma(query, keys.permute((1, 0)), unused, use_acc=False)
            leave(k, done)
            highest = gl.full_like(at, float("-inf"), dtype=gl.float32)
            total = gl.full_like(at, 0.0, dtype=gl.float32)
            weights, _, highest, total = softmax_tile(
                scores, highest, total, item.begin + key, at, scale, True
            )
            weights = gl.convert_layout(weights.to(dtype), of_weight, assert_trivial=True)
            summed = gl.zeros((GROUP_QUERIES, DIM), gl.float32, layout=by_value)
            done += 1
            for _ in range(first_tile + 1, plain):
                weights, highest, total, summed = next_tile(
                    query, k, v, done, key, at, scale, weights, highest, total, summed, unused,
                    False,
                )  # fmt: skip
                done += 1
            for tile in range(plain, tiles):
                weights, highest, total, summed = next_tile(
                    query, k, v, done, tile * TILE_KEYS + key, at, scale, weights, highest,
                    total, summed, unused, True,
                )  # fmt: skip
                done += 1
            values = await_filled(v, done - 1)
            if tiles * TILE_KEYS > item.context:
                half: gl.constexpr = TILE_KEYS // 2
                first_key = (tiles - 1) * TILE_KEYS + WHICH * half
                zero_tail(values.slice(WHICH * half, half, dim=0), first_key, item.context, DIM)
                mbarrier.arrive(clean, count=1)
                mbarrier.wait(clean, cleaned & 1)
                cleaned += 1
            summed = warpgroup_mma(weights, values, summed)
            leave(v, done - 1)
            share = gl.convert_layout(1.0 / total, rows, assert_trivial=True)
            level = gl.convert_layout(
                highest * scale + gl.log2(total), rows, assert_trivial=True
            )
            _leave_result(
                partial, partial_lse, item, summed * share[:, None], level, HEADS, DIM, WHICH
            )
        elif item.exists:
            summed = gl.zeros((GROUP_QUERIES, DIM), gl.float32, layout=by_value)
            level = gl.full((GROUP_QUERIES,), float("-inf"), gl.float32, layout=rows)
            _leave_result(partial, partial_lse, item, summed, level, HEADS, DIM, WHICH)


@gluon.jit(do_not_specialize=["items", "turns", "parts"])
def _attend(queries, pool, contexts, query_start, tables, table_start, tile_row, tile_start,
            part_keys, partial, partial_lse, items, turns, parts, block_rows, layer_row, scaling,
            HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr,
            BLOCK_TOKENS: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = pool.dtype
    layout: gl.constexpr = pool.layout
    # Not a ring: each group of warps has a buffer, which is filled once per item.
    q = make_ring(dtype, layout, 2, GROUP_QUERIES, DIM, 1)
    k = make_ring(dtype, layout, STAGES, TILE_KEYS, DIM, 2)
    v = make_ring(dtype, layout, STAGES, TILE_KEYS, DIM, 2)
    clean = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(clean, count=2)
    fence_async_shared()
    lists = _Lists(
        contexts, query_start, table_start, tile_row, tile_start, part_keys, items, turns, parts
    )
    scale = scaling * 1.4426950408889634
    gl.warp_specialize(
        [
            (_compute, (partial, partial_lse, q, k, v, clean, lists, scale, HEADS, DIM, 0)),
            (_compute, (partial, partial_lse, q, k, v, clean, lists, scale, HEADS, DIM, 1)),
            (_load, (queries, pool, q, k, v, lists, tables, block_rows, layer_row, HEADS,
                     KV_HEADS, DIM, BLOCK_TOKENS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def attend_parts(
    query: Tensor, pool: Tensor, layer: int, work: ChunkWork, variant: Variant, heads: int
) -> None:
    """Leave partial results of all tiles of `work` in `work.partial`; usable if
    `ChunkWork.has_pairs` is set and `prefill_hopper.fits` returns True."""
    num_layers, _, block_tokens, kv_heads, dim = pool.shape[1:]
    items = heads // 2 * len(work.tile_row) * work.num_parts
    processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
    programs = min(items, processors)
    queries, page = [GROUP_QUERIES.value, dim], [PAGE_KEYS.value, dim]
    layout = gl.NVMMASharedLayout.get_default_for(page, TYPES[pool.dtype])
    _attend[(programs,)](
        TensorDescriptor.from_tensor(query[:, : heads * dim], queries, layout),
        TensorDescriptor.from_tensor(pool.view(-1, kv_heads * dim), page, layout),
        *work.lists,
        work.part_keys,
        work.partial,
        work.partial_lse,
        items,
        -(-items // programs),
        work.num_parts,
        num_layers * 2 * block_tokens,
        layer * 2 * block_tokens,
        variant.scaling,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_TOKENS=block_tokens,
        num_warps=4,
        maxnreg=ALL_REGISTERS,
    )
