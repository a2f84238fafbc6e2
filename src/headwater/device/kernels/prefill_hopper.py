"""Prefill attention as in `prefill`, for Hopper: two warp groups compute, a third loads.

A program computes tiles of 128 queries one after another; each computing group has half of a
tile. While the tensor cores compute scores of one tile of keys and sums over the tile before,
the group computes the softmax of the scores it has. Meanwhile the other group uses the tensor
cores. Queries stay in registers, and sums are rescaled only after a higher score: power limits
a busy device, so less work makes the rest faster.

    loads     K0 V0 K1 V1       K2 V2        K3 V3 …
    group 0   S0   | softmax 0  | S1, sums 0 | softmax 1 | S2, sums 1 | …
    group 1     S0   | softmax 0  | S1, sums 0 | softmax 1 | S2, sums 1 | …

It is written in Gluon, Triton's experimental language for a chip's own instructions. `prefill`
uses it only with the version of Triton it was tested with.
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

_SHARED_BYTES = 32 << 20
"""KV that programs running together should share: about half of the device's cache."""


class _Lists(NamedTuple):
    """The work: fields of `ChunkWork`, the number of items, the number of iterations of a
    program, and how many KV heads are attended `together`."""

    contexts: Any
    query_start: Any
    table_start: Any
    tile_row: Any
    tile_start: Any
    tiles: Any
    items: Any
    turns: Any
    together: Any


class _Item(NamedTuple):
    """A tile of queries of one head. Its first query has the index `token` in the batch and
    `first` in its row; `count` queries of the row are left. The tile sees keys before `end`."""

    exists: Any
    head: Any
    token: Any
    count: Any
    context: Any
    first: Any
    end: Any
    table: Any


@gluon.jit
def _take(turn, lists, HEADS: gl.constexpr, KV_HEADS: gl.constexpr):
    """The item of this program in an iteration.

    Heads that share KV follow each other, `together` KV heads at a time. Tiles are sorted by
    their first query, and so by the number of keys they see. Sections are taken alternately in
    ascending and descending order, and so are the programs, so that all programs get about the
    same work. The last section is in descending order, so that all programs end together.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    if turn % 2 == 1:
        program = programs - 1 - program
    number = gl.minimum(turn * programs + program, lists.items - 1)
    exists = turn * programs + program < lists.items
    group: gl.constexpr = HEADS // KV_HEADS
    width = lists.together * group
    section = number // (lists.tiles * width)
    rest = number % (lists.tiles * width)
    tile = rest // width
    if (HEADS // width - section) % 2 == 1:
        tile = lists.tiles - 1 - tile
    head = section * width + rest % width
    row = gl.load(lists.tile_row + tile)
    start = gl.load(lists.tile_start + tile)
    packed = gl.load(lists.query_start + row)
    count = gl.load(lists.query_start + row + 1) - packed
    context = gl.load(lists.contexts + row)
    first = context - count + start
    end = gl.minimum(context, first + 2 * GROUP_QUERIES)
    table = gl.load(lists.table_start + row)
    return _Item(exists, head, packed + start, count - start, context, first, end, table)


@gluon.jit
def _load_tiles(queries, pool, q, k, v, lists, tables, block_rows, layer_row,
           HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr,
           BLOCK_TOKENS: gl.constexpr):  # fmt: skip
    """Load the queries of each item, then its keys and values, as soon as a buffer is free."""
    done = 0
    for turn in range(lists.turns):
        item = _take(turn, lists, HEADS, KV_HEADS)
        if item.exists:
            for which in gl.static_range(2):
                mbarrier.wait(q.empty.index(which), (turn & 1) ^ 1)
                mbarrier.expect(q.ready.index(which), queries.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    queries, [item.token + which * GROUP_QUERIES, item.head * DIM], q.ready.index(which),
                    q.buffers.index(which),
                )  # fmt: skip
            # After the last page none follows: the last one is loaded again, and no query sees
            # it there.
            last = (item.context - 1) // PAGE_KEYS * PAGE_KEYS
            column = item.head // (HEADS // KV_HEADS) * DIM
            # Slots are read one tile ahead.
            slot = gl.load(tables + item.table)
            slot_2 = gl.load(tables + item.table + gl.minimum(PAGE_KEYS, last) // BLOCK_TOKENS)
            for key in range(0, item.end, TILE_KEYS):
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
def _compute(out, q, k, v, clean, lists, scale, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
             DIM: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Attend one half of the queries of each item."""
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
    cleaned = 0
    for turn in range(lists.turns):
        item = _take(turn, lists, HEADS, KV_HEADS)
        if item.exists:
            first = item.first + WHICH * GROUP_QUERIES
            at = first + gl.arange(0, GROUP_QUERIES, layout=gl.SliceLayout(1, by_key))
            tiles = gl.cdiv(item.end, TILE_KEYS)
            # The first tile of keys is masked in any case. The next ones, up to this one, need no
            # mask: every query sees all their keys.
            plain = gl.maximum((first + 1) // TILE_KEYS, 1)
            mbarrier.wait(q.ready.index(WHICH), turn & 1)
            query = q.buffers.index(WHICH).load(of_query)
            fence_async_shared()
            mbarrier.arrive(q.empty.index(WHICH), count=1)
            keys = await_filled(k, done)
            scores = warpgroup_mma(query, keys.permute((1, 0)), unused, use_acc=False)
            leave(k, done)
            highest = gl.full_like(at, float("-inf"), dtype=gl.float32)
            total = gl.full_like(at, 0.0, dtype=gl.float32)
            weights, _, highest, total = softmax_tile(
                scores, highest, total, key, at, scale, True
            )
            weights = gl.convert_layout(weights.to(dtype), of_weight, assert_trivial=True)
            summed = gl.zeros((GROUP_QUERIES, DIM), gl.float32, layout=by_value)
            done += 1
            for _ in range(1, plain):
                weights, highest, total, summed = next_tile(
                    query, k, v, done, key, at, scale, weights, highest, total, summed, unused,
                    False,
                )  # fmt: skip
                done += 1
            for tile in range(plain, tiles):
                weights, highest, total, summed = next_tile(
                    query, k, v, done, tile * TILE_KEYS + key, at, scale, weights, highest, total,
                    summed, unused, True,
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
            result = (summed * share[:, None]).to(dtype)
            inside = gl.arange(0, GROUP_QUERIES, layout=rows) + WHICH * GROUP_QUERIES
            number = gl.arange(0, DIM, layout=gl.SliceLayout(0, by_value))
            place = out + (item.token + inside).to(gl.int64)[:, None] * (HEADS * DIM)
            place += item.head * DIM + number[None, :]
            gl.store(place, result, mask=(inside < item.count)[:, None])


@gluon.jit(do_not_specialize=["items", "tiles", "together", "turns"])
def _attend(queries, pool, contexts, query_start, tables, table_start, tile_row, tile_start, out,
            tiles, items, turns, together, block_rows, layer_row, scaling, HEADS: gl.constexpr,
            KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr):  # fmt: skip
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
        contexts, query_start, table_start, tile_row, tile_start, tiles, items, turns, together
    )
    scale = scaling * 1.4426950408889634
    gl.warp_specialize(
        [
            (_compute, (out, q, k, v, clean, lists, scale, HEADS, KV_HEADS, DIM, 0)),
            (_compute, (out, q, k, v, clean, lists, scale, HEADS, KV_HEADS, DIM, 1)),
            (_load_tiles, (queries, pool, q, k, v, lists, tables, block_rows, layer_row, HEADS,
                      KV_HEADS, DIM, BLOCK_TOKENS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def attend_chunks(
    query: Tensor, pool: Tensor, layer: int, work: ChunkWork, variant: Variant, out: Tensor
) -> None:
    """Like `prefill.attend_chunks`; usable if `fits` returns True."""
    num_layers, _, block_tokens, kv_heads, dim = pool.shape[1:]
    heads, tiles = out.shape[1], len(work.tile_row)
    processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
    items = heads * tiles
    programs = min(items, processors)
    queries, page = [GROUP_QUERIES.value, dim], [PAGE_KEYS.value, dim]
    layout = gl.NVMMASharedLayout.get_default_for(page, TYPES[pool.dtype])
    _attend[(programs,)](
        TensorDescriptor.from_tensor(query[:, : heads * dim], queries, layout),
        TensorDescriptor.from_tensor(pool.view(-1, kv_heads * dim), page, layout),
        *work.lists,
        out,
        tiles,
        items,
        -(-items // programs),
        _together(kv_heads, work.longest_context * dim * 2 * pool.element_size()),
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


def takes(pool: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device is a Hopper, and tiles of keys are contiguous in a pool of `dtype`."""
    block_tokens, _, dim = pool.shape[3:]
    return (
        dtype in TYPES
        and block_tokens % PAGE_KEYS.value == 0
        and dim in (64, 128)
        and torch.cuda.get_device_capability(pool.device)[0] == 9
    )


def fits(variant: Variant) -> bool:
    """Whether each token of a layer attends to all tokens before it, without soft-caps or sinks."""
    return variant.window is None and variant.has_plain_scores


def _together(kv_heads: int, head_bytes: int) -> int:
    """KV heads whose keys and values, for the longest row, fit into the device's cache."""
    return max(
        number
        for number in range(1, kv_heads + 1)
        if number == 1 or (kv_heads % number == 0 and number * head_bytes <= _SHARED_BYTES)
    )
