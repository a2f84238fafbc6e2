"""Causal attention of prompt chunks over the block pool, with any prefix.

A list from the host gives each program a tile of queries of one row. K and V of the chunk
itself are already in the pool, so a tile reads prefix and chunk in the same way. A short chunk
with a long prefix has too few tiles for the device. Then the keys are cut into parts, each part
leaves a partial result, and a second kernel joins them.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.kernels import latent
from headwater.device.kernels.fp8 import dequantize_layer, power_of_two
from headwater.device.kernels.tiles import LARGE_TILE, ChunkWork

_HAS_HOPPER_KERNEL = triton.__version__.startswith("3.6.")
if _HAS_HOPPER_KERNEL:
    from headwater.device.kernels import prefill_hopper, prefill_pairs


@triton.jit
def _keys_seen(
    q,
    highest,
    total,
    summed,
    begin,
    end,
    context,
    query_at,
    pool,
    table,
    block_stride,
    offset,
    kv_head,
    scaling,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
):
    plane: tl.constexpr = BLOCK_TOKENS * KV_HEADS * DIM
    at = tl.arange(0, WIDTH)
    if FP8:
        scales = pool.to(tl.pointer_type(tl.uint8)) + 2 * plane + kv_head - kv_head * DIM
    # Slots are read one iteration ahead: a load that depends on a slot read in the same
    # iteration is not pipelined.
    slot = tl.load(table + begin // BLOCK_TOKENS, mask=begin < end, other=0).to(tl.int64)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = first + tl.arange(0, KEYS)
        if BLOCK_TOKENS % KEYS == 0:
            place = slot * block_stride + offset + (key % BLOCK_TOKENS) * (KV_HEADS * DIM)
            after = tl.minimum(first + KEYS, end - 1)
            slot = tl.load(table + after // BLOCK_TOKENS).to(tl.int64)
        else:
            known = key < context
            slots = tl.load(table + key // BLOCK_TOKENS, mask=known, other=0).to(tl.int64)
            place = slots * block_stride + offset + (key % BLOCK_TOKENS) * (KV_HEADS * DIM)
        if MASKED or WIDTH != DIM:
            inside = (key < context)[:, None] & (at < DIM)[None, :]
            k = tl.load(pool + place[:, None] + at[None, :], mask=inside, other=0.0)
            v = tl.load(pool + plane + place[:, None] + at[None, :], mask=inside, other=0.0)
        else:
            k = tl.load(pool + place[:, None] + at[None, :])
            v = tl.load(pool + plane + place[:, None] + at[None, :])
        if FP8:
            # Scales of keys follow the elements: one byte for a key of DIM elements.
            # `place` advances by KV_HEADS * DIM for each token, scales by KV_HEADS: this is the
            # difference.
            of_key = (key % BLOCK_TOKENS) * (KV_HEADS * (DIM - 1))
            scale_at = scales + (place - of_key)
            k_exponent = tl.load(scale_at, mask=key < context, other=127).to(tl.int32)
            v_exponent = tl.load(
                scale_at + BLOCK_TOKENS * KV_HEADS, mask=key < context, other=1
            ).to(tl.int32)
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        if EXACT:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k))
        if FP8:
            scores = scores * power_of_two(k_exponent)[None, :]
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores * scaling / softcap) - 1)
            scores = scores * 1.4426950408889634
        else:
            scores = scores * (scaling * 1.4426950408889634)
        if MASKED:
            seen = key[None, :] <= query_at[:, None]
            if WINDOWED:
                seen = seen & (key[None, :] > query_at[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # Without a mask every query has seen a key, so the maximum is finite.
        base = higher
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        summed = summed * decay[:, None]
        if FP8:
            # Scales relative to the largest one of the tile: float16 could not represent very
            # small scales.
            v_top = tl.max(v_exponent, 0)
            weights = weights * tl.exp2((v_exponent - v_top).to(tl.float32))[None, :]
            if EXACT:
                part = tl.dot(weights, v, input_precision="ieee")
            else:
                part = tl.dot(weights.to(v.dtype), v)
            summed += part * power_of_two(v_top)
        elif EXACT:
            summed = tl.dot(weights, v, summed, input_precision="ieee")
        else:
            summed = tl.dot(weights.to(v.dtype), v, summed)
        highest = higher
    return highest, total, summed


@triton.jit
def _attend(
    query,
    pool,
    contexts,
    query_start,
    tables,
    table_start,
    tile_row,
    tile_start,
    part_keys,
    partial,
    partial_lse,
    sinks,
    out,
    query_stride,
    block_stride,
    layer_at,
    scaling,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    FP8: tl.constexpr,
):
    head = tl.program_id(0)
    # The last tiles see the most keys, so they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = tl.load(tile_row + tile)
    start = tl.load(tile_start + tile)
    packed = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - packed
    context = tl.load(contexts + row)
    prefix = context - count
    table = tables + tl.load(table_start + row)
    of_tile = start + tl.arange(0, QUERIES)
    query_at = prefix + of_tile
    at = tl.arange(0, WIDTH)
    wanted = (of_tile < count)[:, None] & (at < DIM)[None, :]
    token = (packed + of_tile).to(tl.int64)
    rows = query + token[:, None] * query_stride + head * DIM + at[None, :]
    q = tl.load(rows, mask=wanted, other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, WIDTH], tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    offset = layer_at + kv_head * DIM
    end = tl.minimum(context, prefix + start + QUERIES)
    # Every query of the tile sees keys before `plain`.
    begin = 0
    plain = (prefix + start) // KEYS * KEYS
    if WINDOWED:
        begin = tl.maximum(prefix + start - window + 1, 0) // KEYS * KEYS
        plain = begin
    if PARTS > 1:
        size = tl.load(part_keys + tile)
        part = tl.program_id(2)
        begin = tl.maximum(begin, part * size)
        end = tl.minimum(end, (part + 1) * size)
        plain = tl.minimum(tl.maximum(plain, begin), tl.maximum(end, begin))
    if not WINDOWED:
        highest, total, summed = _keys_seen(
            q, highest, total, summed, begin, plain, context, query_at, pool, table,
            block_stride, offset, kv_head, scaling, softcap, window, KV_HEADS, DIM,
            BLOCK_TOKENS, KEYS, WIDTH, False, False, CAPPED, EXACT, STAGES, FP8,
        )  # fmt: skip
    highest, total, summed = _keys_seen(
        q, highest, total, summed, plain, end, context, query_at, pool, table,
        block_stride, offset, kv_head, scaling, softcap, window, KV_HEADS, DIM, BLOCK_TOKENS,
        KEYS, WIDTH, True, WINDOWED, CAPPED, EXACT, STAGES, FP8,
    )  # fmt: skip
    if SINKS and PARTS == 1:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(highest, sink)
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.exp2(sink - higher)
        summed = summed * decay[:, None]
    result = summed / tl.where(total == 0, 1.0, total)[:, None]
    if PARTS == 1:
        place = token[:, None] * (HEADS * DIM) + head * DIM + at[None, :]
        tl.store(out + place, result, mask=wanted)
    else:
        slot = (
            (tile * PARTS + tl.program_id(2)) * QUERIES + tl.arange(0, QUERIES)
        ) * HEADS + head
        tl.store(partial + slot[:, None] * DIM + at[None, :], result, mask=(at < DIM)[None, :])
        level = tl.where(total == 0, float("-inf"), highest + tl.log2(total))
        tl.store(partial_lse + slot, level)


@triton.jit
def _join(
    query_start,
    tile_row,
    tile_start,
    partial,
    partial_lse,
    sinks,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tile_row + tile)
    of_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    of_row = tl.load(tile_start + tile) + of_tile
    packed = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - packed
    at = tl.arange(0, WIDTH)
    inside = (of_row < count)[:, None] & (at < DIM)[None, :]
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    if SINKS:
        highest = (
            tl.zeros([ROWS], tl.float32)
            + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        )
        total = total + 1.0
    for part in range(PARTS):
        slot = ((tile * PARTS + part) * QUERIES + of_tile) * HEADS + head
        level = tl.load(partial_lse + slot)
        values = tl.load(partial + slot[:, None] * DIM + at[None, :], mask=inside, other=0.0)
        higher = tl.maximum(highest, level)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(highest - base)
        weight = tl.exp2(level - base)
        summed = summed * decay[:, None] + values * weight[:, None]
        total = total * decay + weight
        highest = higher
    result = summed / tl.where(total == 0, 1.0, total)[:, None]
    token = (packed + of_row).to(tl.int64)
    tl.store(
        out + token[:, None] * (HEADS * DIM) + head * DIM + at[None, :], result, mask=inside
    )


def has_hopper_kernel(pool: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether there is a Hopper kernel for many tiles over this pool, whose 8-bit elements are
    converted to `dtype`."""
    return (
        _HAS_HOPPER_KERNEL
        and pool.shape[2] == 2
        and prefill_hopper.takes(pool, dtype or pool.dtype)
    )


def takes_pairs(pool: Tensor, heads: int, tile: int) -> bool:
    """Whether two heads of a short tile are attended together, if its keys are cut into
    parts."""
    return (
        tile == LARGE_TILE // 2
        and pool.element_size() == 2
        and has_hopper_kernel(pool)
        and heads // pool.shape[4] % 2 == 0
    )


def is_slower_than_torch(pool: Tensor) -> bool:
    """Whether torch's own kernel is faster for prompts that are contiguous.

    On Hopper, torch's kernel was slower with heads of 128 elements and seems faster with 64. On
    devices without a kernel for many tiles it is probably faster. It supports two-byte types.
    """
    is_beaten = has_hopper_kernel(pool) and pool.shape[-1] == 128
    return pool.shape[2] == 2 and pool.element_size() == 2 and not is_beaten


def _converted(work: ChunkWork) -> ChunkWork:
    """`work` over the converted blocks: entry i of its tables is block i of their pool."""
    if work.converted is None:
        entries = torch.arange(
            work.end_entry - work.first_entry, dtype=torch.int32, device=work.tables.device
        )
        starts = work.table_start - work.first_entry
        work.converted = replace(work, tables=entries, table_start=starts)
    return work.converted


def attend_chunks(
    query: Tensor, pool: Tensor, layer: int, work: ChunkWork, variant: Variant, out: Tensor
) -> None:
    """Attention of all tokens of the rows that have tiles; other rows of `out` are not changed.

    `query` is `[tokens, >= heads * dim]`, `out` `[tokens, heads, dim]`; over a pool of latents,
    `out` has the size of a latent.
    """
    if pool.shape[2] == 1:
        latent.attend_chunks(query, pool, layer, work, variant, out)
        _join_parts(work, out, out)
        return
    if work.use_hopper and prefill_hopper.fits(variant):
        if pool.element_size() == 1:
            slots = work.tables[work.first_entry : work.end_entry]
            pool, layer = dequantize_layer(pool, layer, slots, query.dtype), 0
            work = _converted(work)
        prefill_hopper.attend_chunks(query, pool, layer, work, variant, out)
        return
    block_tokens, kv_heads, dim = pool.shape[3:]
    heads, tiles = out.shape[1], len(work.tile_row)
    has_parts = work.num_parts > 1
    if has_parts and takes_pairs(pool, heads, work.tile) and prefill_hopper.fits(variant):
        prefill_pairs.attend_parts(query, pool, layer, work, variant, heads)
        _join_parts(work, out, out)
        return
    exact = query.element_size() == 4
    sinks = out if variant.sinks is None else variant.sinks
    width = max(16, triton.next_power_of_2(dim))
    _attend[(heads, tiles, work.num_parts)](
        query,
        pool,
        *work.lists,
        work.part_keys,
        work.partial,
        work.partial_lse,
        sinks,
        out,
        query.stride(0),
        pool.stride(0),
        layer * pool.stride(1),
        variant.scaling,
        variant.softcap or 1.0,
        variant.window or 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_TOKENS=block_tokens,
        KEYS=32 if exact else 64,
        QUERIES=work.tile,
        WIDTH=width,
        WINDOWED=variant.window is not None,
        CAPPED=variant.softcap is not None,
        SINKS=variant.sinks is not None,
        EXACT=exact,
        STAGES=2,
        PARTS=work.num_parts,
        FP8=pool.element_size() == 1,
        num_warps=8 if work.tile == LARGE_TILE else 4,
    )
    _join_parts(work, sinks, out, has_sinks=variant.sinks is not None)


def _join_parts(
    work: ChunkWork, sinks: Tensor, out: Tensor, *, has_sinks: bool = False
) -> None:
    """Join the partial results of tiles with several parts."""
    if work.num_parts == 1:
        return
    heads, dim = out.shape[1:]
    _join[(heads, len(work.tile_row), work.tile // 16)](
        work.query_start,
        work.tile_row,
        work.tile_start,
        work.partial,
        work.partial_lse,
        sinks,
        out,
        HEADS=heads,
        DIM=dim,
        QUERIES=work.tile,
        ROWS=16,
        WIDTH=max(16, triton.next_power_of_2(dim)),
        SINKS=has_sinks,
        PARTS=work.num_parts,
    )
