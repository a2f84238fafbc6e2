"""Decode attention over a pool of 8-bit KV, in the pieces that `decode` describes.

Elements are converted to float16, which represents every e4m3 value exactly, inside the
products. Scales are not applied to them. A key's scale multiplies its scores. A value's scale
is a power of two and is added to its scores, which are logarithms to the base of two; the sum
of weights is corrected for it. Weights stay within float16, because the highest score is
subtracted after that. Queries are divided by a power of two for the same reason.

As in `decode_tma`, scores are `[keys, queries]`, and TMA loads tiles if the layout allows it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.device.attention.base import Variant
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.fp8 import power_of_two, scale_exponent
from headwater.device.kernels.pieces import DecodeWork

_KEYS = 64
_TMA_STAGES, _STAGES = 4, 2
"""Tiles that are read ahead, with TMA and without."""

_MIN_EXPONENT = 67
"""Scales of values are limited to at least 2 ** (this - 127); otherwise the sum of weights
would overflow."""


@triton.jit
def _attend_tile(k, v, k_exponent, v_exponent, q, q_scale, seen, highest, total, summed, softcap,
                 least: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    scores = tl.dot(k.to(tl.float16), q) * (
        power_of_two(k_exponent)[:, None] * q_scale[None, :]
    )
    if CAPPED:
        capped = softcap * (2 * tl.sigmoid(2 * scores / (softcap * 1.4426950408889634)) - 1)
        scores = capped * 1.4426950408889634
    shift = (tl.maximum(v_exponent, least) - 127).to(tl.float32)
    scores = scores + shift[:, None]
    if MASKED:
        scores = tl.where(seen[:, None], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 0))
    base = higher
    if MASKED:
        # If nothing was seen yet, the maximum is -infinity, and -infinity minus itself is NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[None, :])
    decay = tl.exp2(highest - base)
    # The weights contain the scales of the values, which the sum of weights must not.
    total = total * decay + tl.sum(weights * tl.exp2(-shift)[:, None], 0)
    summed = tl.dot(tl.trans(v.to(tl.float16)), weights.to(tl.float16), summed * decay[None, :])
    return higher, total, summed


@triton.jit
def _attend(
    query,
    tiles,
    pool,
    contexts,
    tables,
    table_start,
    piece,
    work_row,
    work_start,
    row_work,
    partial,
    partial_lse,
    sinks,
    out,
    query_stride,
    block_stride,
    layer_at,
    block_rows,
    layer_row,
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
    TMA: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_early(EARLY)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(work_row + item)
    if row < 0:
        return
    group: tl.constexpr = HEADS // KV_HEADS
    plane: tl.constexpr = BLOCK_TOKENS * KV_HEADS * DIM
    start = tl.load(work_start + item)
    context = tl.load(contexts + row)
    end = tl.minimum(start + tl.load(piece), context)
    since = context - window
    if WINDOWED:
        start = tl.maximum(start, (tl.maximum(since, 0) // KEYS) * KEYS)
    table = tables + tl.load(table_start + row)
    of_group = tl.arange(0, QUERIES)
    at = tl.arange(0, WIDTH)
    head = kv_head * group + of_group
    wanted = (at < DIM)[:, None] & (of_group < group)[None, :]
    rows = query + row.to(tl.int64) * query_stride + head[None, :] * DIM + at[:, None]
    exact = tl.load(rows, mask=wanted, other=0.0).to(tl.float32)
    q_exponent = scale_exponent(tl.max(tl.abs(exact), 0))
    # 254 - e is the exponent byte of the inverse: 2 ** (127 - e).
    q = (exact * power_of_two(254 - q_exponent)[None, :]).to(tl.float16)
    q_scale = power_of_two(q_exponent) * (scaling * 1.4426950408889634)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([WIDTH, QUERIES], tl.float32)
    numbers = pool + layer_at + kv_head * DIM
    # Scales of a layer follow both of its planes; elements and scales are bytes, so offsets are
    # the same.
    scales = pool.to(tl.pointer_type(tl.uint8)) + layer_at + 2 * plane + kv_head
    in_tile = tl.arange(0, KEYS)
    whole = start
    if TMA:
        whole = start + tl.maximum(end - start, 0) // KEYS * KEYS
        # Slots are read one iteration ahead: a load that depends on a slot read in the same
        # iteration is not pipelined.
        slot = tl.load(table + tl.minimum(start, context - 1) // BLOCK_TOKENS)
        for first in tl.range(start, whole, KEYS, num_stages=STAGES):
            inside = first % BLOCK_TOKENS
            line = slot * block_rows + layer_row + inside
            at_scale = scales + slot.to(tl.int64) * block_stride + (inside + in_tile) * KV_HEADS
            slot = tl.load(table + tl.minimum(first + KEYS, end - 1) // BLOCK_TOKENS)
            k = tiles.load([line, kv_head * DIM])
            v = tiles.load([line + BLOCK_TOKENS, kv_head * DIM])
            k_exponent = tl.load(at_scale).to(tl.int32)
            v_exponent = tl.load(at_scale + BLOCK_TOKENS * KV_HEADS).to(tl.int32)
            seen = first + in_tile >= since
            highest, total, summed = _attend_tile(
                k, v, k_exponent, v_exponent, q, q_scale, seen, highest, total, summed, softcap,
                LEAST, CAPPED, WINDOWED,
            )  # fmt: skip
    for first in tl.range(whole, end, KEYS, num_stages=1 if TMA else STAGES):
        key = first + in_tile
        seen = key < end
        slots = tl.load(table + key // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
        place = slots * block_stride + (key % BLOCK_TOKENS) * (KV_HEADS * DIM)
        at_scale = scales + slots * block_stride + (key % BLOCK_TOKENS) * KV_HEADS
        known = seen[:, None] & (at < DIM)[None, :]
        k = tl.load(numbers + place[:, None] + at[None, :], mask=known, other=0.0)
        v = tl.load(numbers + plane + place[:, None] + at[None, :], mask=known, other=0.0)
        k_exponent = tl.load(at_scale, mask=seen, other=127).to(tl.int32)
        v_exponent = tl.load(at_scale + BLOCK_TOKENS * KV_HEADS, mask=seen, other=127)
        if WINDOWED:
            seen = seen & (key >= since)
        highest, total, summed = _attend_tile(
            k, v, k_exponent, v_exponent.to(tl.int32), q, q_scale, seen, highest, total, summed,
            softcap, LEAST, CAPPED, True,
        )  # fmt: skip
    is_whole = tl.load(row_work + row + 1) - tl.load(row_work + row) == 1
    if SINKS:
        # Counted once per row, by the program that finishes it.
        sink = tl.load(sinks + head, mask=of_group < group, other=0.0).to(tl.float32)
        sink = tl.where(is_whole, sink * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(highest, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(highest - base)
        total = total * decay + tl.exp2(sink - base)
        summed = summed * decay[None, :]
        highest = higher
    result = summed / tl.where(total == 0, 1.0, total)[None, :]
    if is_whole:
        done = row.to(tl.int64) * (HEADS * DIM) + head[None, :] * DIM + at[:, None]
        tl.store(out + done, result, mask=wanted)
    else:
        part = item.to(tl.int64) * HEADS + head
        tl.store(partial + part[None, :] * DIM + at[:, None], result, mask=wanted)
        level = tl.where(total == 0, float("-inf"), highest + tl.log2(total))
        tl.store(partial_lse + part, level, mask=of_group < group)


def attend_pieces(
    query: Tensor,
    pool: Tensor,
    layer: int,
    work: DecodeWork,
    variant: Variant,
    out: Tensor,
) -> None:
    """Attend the pieces of `decode.attend_decodes`, which joins them; `pool` has e4m3
    elements."""
    block_tokens, kv_heads, dim = pool.shape[3:]
    heads = out.shape[1]
    row = kv_heads * dim
    uses_tma = _uses_tma(pool)
    tiles = pool
    if uses_tma:
        flat = pool.as_strided((len(pool) * pool.stride(0) // row, row), (row, 1))
        tiles = TensorDescriptor.from_tensor(flat, [_KEYS, dim])
    group = heads // kv_heads
    stages = _TMA_STAGES if uses_tma else _STAGES
    early = starts_early(query)
    _attend[(kv_heads, len(work.work_row))](
        query,
        tiles,
        pool,
        work.contexts,
        work.tables,
        work.table_start,
        work.piece,
        work.work_row,
        work.work_start,
        work.row_work,
        work.partial,
        work.partial_lse,
        out if variant.sinks is None else variant.sinks,
        out,
        query.stride(0),
        pool.stride(0),
        layer * pool.stride(1),
        pool.stride(0) // row,
        layer * pool.stride(1) // row,
        variant.scaling,
        variant.softcap or 1.0,
        variant.window or 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_TOKENS=block_tokens,
        KEYS=_KEYS,
        QUERIES=max(16, triton.next_power_of_2(group)),
        WIDTH=max(64, triton.next_power_of_2(dim)),
        WINDOWED=variant.window is not None,
        CAPPED=variant.softcap is not None,
        SINKS=variant.sinks is not None,
        TMA=uses_tma,
        LEAST=_MIN_EXPONENT,
        STAGES=stages,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )


def _uses_tma(pool: Tensor) -> bool:
    """Whether TMA can load the tiles: they must be boxes of a matrix whose rows are the heads
    of all tokens."""
    block_tokens, kv_heads, dim = pool.shape[3:]
    return (
        block_tokens % _KEYS == 0
        and dim in (64, 128)
        and pool.stride(1) % (kv_heads * dim) == 0
        and pool.is_cuda
        and torch.cuda.get_device_capability(pool.device) >= (9, 0)
    )
