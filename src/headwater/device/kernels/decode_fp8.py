"""Decode attention over a pool of 8-bit KV, in the pieces that `decode` describes.

Elements are converted to float16, which represents every e4m3 value exactly, in the registers
from which the tensor cores read them. Values are read as pairs of neighbouring elements: the
load that transposes 16-bit numbers then transposes values, and each half of the pairs is a
product of its own.

Scales are not applied to elements. A key's scale multiplies its scores. A value's scale
is a power of two and is added to its scores, which are logarithms to the base of two; the sum
of weights is corrected for it. Weights stay within float16, because the highest score is
subtracted after this addition. Queries are divided by a power of two for the same reason.

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
from headwater.device.kernels.unpack import e4m3_halves

_KEYS = 64

_QUERIES = 8
"""Queries of a program. With eight columns, products of a warp need no other warp; heads that
share more queries are computed by several programs."""

_FEW_ROWS, _FEW_SHAPE, _SHAPE = 64, (1, 4), (2, 3)
"""Tiles of an iteration, and iterations that are read ahead: the first pair for up to
`_FEW_ROWS` rows, the second for more."""

MIN_EXPONENT = 67
"""Scales of values are limited to at least 2 ** (this - 127); otherwise the sum of weights
would overflow."""


@triton.jit
def _score(k, k_exponent, v_exponent, q, q_scale, softcap, LEAST: tl.constexpr,
           CAPPED: tl.constexpr):  # fmt: skip
    """Scores of keys, with the scales of the values; and the inverse of these scales."""
    scores = tl.dot(k.to(tl.float16), q) * (
        power_of_two(k_exponent)[:, None] * q_scale[None, :]
    )
    if CAPPED:
        capped = softcap * (2 * tl.sigmoid(2 * scores / (softcap * 1.4426950408889634)) - 1)
        scores = capped * 1.4426950408889634
    shift = (tl.maximum(v_exponent, LEAST) - 127).to(tl.float32)
    return scores + shift[:, None], tl.exp2(-shift)


@triton.jit
def _base(highest, MASKED: tl.constexpr):
    """What is subtracted from scores: their maximum, or 0 while that is -infinity, because
    -infinity minus itself is NaN."""
    if MASKED:
        highest = tl.where(highest == float("-inf"), 0.0, highest)
    return highest


@triton.jit
def _raise_to(higher, highest, total, even, odd, MASKED: tl.constexpr):
    """Sums relative to a higher maximum."""
    decay = tl.exp2(highest - _base(higher, MASKED))
    return total * decay, even * decay[None, :], odd * decay[None, :]


@triton.jit
def _add_values(v, scores, inverse, highest, total, even, odd, MASKED: tl.constexpr):
    weights = tl.exp2(scores - _base(highest, MASKED)[None, :])
    # The weights contain the scales of the values; the sum of weights must not contain them.
    total += tl.sum(weights * inverse[:, None], 0)
    even_v, odd_v = e4m3_halves(tl.trans(v))
    weights = weights.to(tl.float16)
    return total, tl.dot(even_v, weights, even), tl.dot(odd_v, weights, odd)


@triton.jit
def _exponents(scales, slot, inside, block_stride, BLOCK_TOKENS: tl.constexpr,
               KV_HEADS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Exponent bytes of the keys and values of a tile that begins at token `inside` of a
    block."""
    at = scales + slot.to(tl.int64) * block_stride + (inside + tl.arange(0, KEYS)) * KV_HEADS
    return tl.load(at), tl.load(at + BLOCK_TOKENS * KV_HEADS)


@triton.jit
def _attend(
    query,
    tiles,
    pair_tiles,
    pool,
    pool_pairs,
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
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_early(EARLY)
    group: tl.constexpr = HEADS // KV_HEADS
    parts: tl.constexpr = (group + QUERIES - 1) // QUERIES
    kv_head = tl.program_id(0) // parts
    item = tl.program_id(1)
    row = tl.load(work_row + item)
    if row < 0:
        return
    plane: tl.constexpr = BLOCK_TOKENS * KV_HEADS * DIM
    pairs: tl.constexpr = DIM // 2
    start = tl.load(work_start + item)
    context = tl.load(contexts + row)
    end = tl.minimum(start + tl.load(piece), context)
    since = context - window
    if WINDOWED:
        start = tl.maximum(start, (tl.maximum(since, 0) // KEYS) * KEYS)
    table = tables + tl.load(table_start + row)
    of_group = tl.program_id(0) % parts * QUERIES + tl.arange(0, QUERIES)
    of_query = of_group < group
    at = tl.arange(0, WIDTH)
    at_pair = tl.arange(0, WIDTH // 2)
    head = kv_head * group + of_group
    rows = query + row.to(tl.int64) * query_stride + head[None, :] * DIM + at[:, None]
    exact = tl.load(rows, mask=(at < DIM)[:, None] & of_query[None, :], other=0.0)
    exact = exact.to(tl.float32)
    q_exponent = scale_exponent(tl.max(tl.abs(exact), 0))
    # 254 - e is the exponent byte of the inverse: 2 ** (127 - e).
    q = (exact * power_of_two(254 - q_exponent)[None, :]).to(tl.float16)
    q_scale = power_of_two(q_exponent) * (scaling * 1.4426950408889634)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    even = tl.zeros([WIDTH // 2, QUERIES], tl.float32)
    odd = tl.zeros([WIDTH // 2, QUERIES], tl.float32)
    # Scales of a layer follow both of its planes; elements and scales are bytes, so offsets are
    # the same.
    scales = pool.to(tl.pointer_type(tl.uint8)) + layer_at + 2 * plane + kv_head
    in_tile = tl.arange(0, KEYS)
    whole = start
    if TMA:
        step: tl.constexpr = KEYS * TILES
        whole = start + tl.maximum(end - start, 0) // step * step
        last = context - 1
        # Slots and scales are read one iteration ahead: such small loads are not pipelined, and
        # neither is a load that depends on a slot read in the same iteration.
        slot = tl.load(table + tl.minimum(start, last) // BLOCK_TOKENS)
        k_next, v_next = _exponents(
            scales, slot, start % BLOCK_TOKENS, block_stride, BLOCK_TOKENS, KV_HEADS, KEYS
        )
        if TILES == 2:
            second = start + KEYS
            slot2 = tl.load(table + tl.minimum(second, last) // BLOCK_TOKENS)
            k_next2, v_next2 = _exponents(
                scales, slot2, second % BLOCK_TOKENS, block_stride, BLOCK_TOKENS, KV_HEADS, KEYS
            )
        for first in tl.range(start, whole, step, num_stages=STAGES):
            line = slot * block_rows + layer_row + first % BLOCK_TOKENS
            k_exponent, v_exponent = k_next.to(tl.int32), v_next.to(tl.int32)
            after = first + step
            slot = tl.load(table + tl.minimum(after, last) // BLOCK_TOKENS)
            k = tiles.load([line, kv_head * DIM])
            v = pair_tiles.load([line + BLOCK_TOKENS, kv_head * pairs])
            k_next, v_next = _exponents(
                scales, slot, after % BLOCK_TOKENS, block_stride, BLOCK_TOKENS, KV_HEADS, KEYS
            )
            scores, inverse = _score(
                k, k_exponent, v_exponent, q, q_scale, softcap, LEAST, CAPPED
            )
            if WINDOWED:
                scores = tl.where((first + in_tile >= since)[:, None], scores, float("-inf"))
            top = tl.max(scores, 0)
            if TILES == 2:
                second = first + KEYS
                line = slot2 * block_rows + layer_row + second % BLOCK_TOKENS
                k_exponent, v_exponent = k_next2.to(tl.int32), v_next2.to(tl.int32)
                after = second + step
                slot2 = tl.load(table + tl.minimum(after, last) // BLOCK_TOKENS)
                k2 = tiles.load([line, kv_head * DIM])
                v2 = pair_tiles.load([line + BLOCK_TOKENS, kv_head * pairs])
                k_next2, v_next2 = _exponents(
                    scales, slot2, after % BLOCK_TOKENS, block_stride, BLOCK_TOKENS, KV_HEADS,
                    KEYS,
                )  # fmt: skip
                scores2, inverse2 = _score(
                    k2, k_exponent, v_exponent, q, q_scale, softcap, LEAST, CAPPED
                )
                if WINDOWED:
                    unseen = second + in_tile < since
                    scores2 = tl.where(unseen[:, None], float("-inf"), scores2)
                top = tl.max(tl.maximum(scores, scores2), 0)
            higher = tl.maximum(highest, top)
            total, even, odd = _raise_to(higher, highest, total, even, odd, WINDOWED)
            highest = higher
            total, even, odd = _add_values(
                v, scores, inverse, highest, total, even, odd, WINDOWED
            )
            if TILES == 2:
                total, even, odd = _add_values(
                    v2, scores2, inverse2, highest, total, even, odd, WINDOWED
                )
    for first in tl.range(whole, end, KEYS, num_stages=1 if TMA else 2):
        key = first + in_tile
        seen = key < end
        slots = tl.load(table + key // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
        place = slots * block_stride + (key % BLOCK_TOKENS) * (KV_HEADS * DIM)
        at_scale = scales + slots * block_stride + (key % BLOCK_TOKENS) * KV_HEADS
        k = tl.load(
            pool + (layer_at + kv_head * DIM) + place[:, None] + at[None, :],
            mask=seen[:, None] & (at < DIM)[None, :],
            other=0.0,
        )
        first_pair = (layer_at + plane + kv_head * DIM) // 2
        v = tl.load(
            pool_pairs + first_pair + (place // 2)[:, None] + at_pair[None, :],
            mask=seen[:, None] & (at_pair < pairs)[None, :],
            other=0,
        )
        k_exponent = tl.load(at_scale, mask=seen, other=127).to(tl.int32)
        v_exponent = tl.load(at_scale + BLOCK_TOKENS * KV_HEADS, mask=seen, other=127)
        if WINDOWED:
            seen = seen & (key >= since)
        scores, inverse = _score(
            k, k_exponent, v_exponent.to(tl.int32), q, q_scale, softcap, LEAST, CAPPED
        )
        scores = tl.where(seen[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 0))
        total, even, odd = _raise_to(higher, highest, total, even, odd, True)
        highest = higher
        total, even, odd = _add_values(v, scores, inverse, highest, total, even, odd, True)
    is_whole = tl.load(row_work + row + 1) - tl.load(row_work + row) == 1
    if SINKS:
        # Counted once per row, by the program that finishes it.
        sink = tl.load(sinks + head, mask=of_query, other=0.0).to(tl.float32)
        sink = tl.where(is_whole, sink * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(highest, sink)
        total, even, odd = _raise_to(higher, highest, total, even, odd, True)
        total += tl.exp2(sink - _base(higher, True))
        highest = higher
    inverse_total = (1.0 / tl.where(total == 0, 1.0, total))[None, :]
    even *= inverse_total
    odd *= inverse_total
    wanted = (at_pair < pairs)[:, None] & of_query[None, :]
    if is_whole:
        done = out + row.to(tl.int64) * (HEADS * DIM) + head[None, :] * DIM
        done += 2 * at_pair[:, None]
        tl.store(done, even.to(out.dtype.element_ty), mask=wanted)
        tl.store(done + 1, odd.to(out.dtype.element_ty), mask=wanted)
    else:
        part = item.to(tl.int64) * HEADS + head
        left = partial + part[None, :] * DIM + 2 * at_pair[:, None]
        tl.store(left, even, mask=wanted)
        tl.store(left + 1, odd, mask=wanted)
        level = tl.where(total == 0, float("-inf"), highest + tl.log2(total))
        tl.store(partial_lse + part, level, mask=of_query)


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
    pool_pairs = pool.as_strided((len(pool) * pool.stride(0),), (1,)).view(torch.int16)
    tiles, pair_tiles = pool, pool_pairs
    if uses_tma:
        lines = len(pool) * pool.stride(0) // row
        flat = pool.as_strided((lines, row), (row, 1))
        tiles = TensorDescriptor.from_tensor(flat, [_KEYS, dim])
        pair_tiles = TensorDescriptor.from_tensor(
            pool_pairs[: lines * row // 2].view(lines, row // 2), [_KEYS, dim // 2]
        )
    parts = triton.cdiv(heads // kv_heads, _QUERIES)
    tiles_at_once, stages = _FEW_SHAPE if len(out) <= _FEW_ROWS else _SHAPE
    early = starts_early(query, is_short=True)
    _attend[(kv_heads * parts, len(work.work_row))](
        query,
        tiles,
        pair_tiles,
        pool,
        pool_pairs,
        *work.lists,
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
        QUERIES=_QUERIES,
        WIDTH=max(64, triton.next_power_of_2(dim)),
        WINDOWED=variant.window is not None,
        CAPPED=variant.softcap is not None,
        SINKS=variant.sinks is not None,
        TMA=uses_tma,
        LEAST=MIN_EXPONENT,
        TILES=tiles_at_once,
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
