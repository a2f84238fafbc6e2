"""Attention of single tokens over the block pool, their contexts cut into pieces (split-KV).

A list from the host assigns a piece of a row to each program, so that every processor has the
same amount of work for any lengths. A row with one piece is finished at once. Each piece of
another row leaves a partial result, and a second kernel joins them.

    work_row     0    0    0    1    2    2   -1   -1      -1 is nothing to do
    work_start   0   512 1024   0    0   512   .    .      tokens
"""

import triton
import triton.language as tl
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.kernels import decode_fp8, decode_tma, latent, latent_fp8
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.pieces import DecodeWork

_MAX_NARROW = 256
"""Largest head size for which one warp joins the pieces."""


@triton.jit
def _attend(
    query,
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
    EARLY: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(work_row + item)
    is_used = row >= 0
    row = tl.maximum(row, 0)
    group: tl.constexpr = HEADS // KV_HEADS
    start = tl.load(work_start + item)
    context = tl.load(contexts + row)
    end = tl.minimum(start + tl.load(piece), context)
    if WINDOWED:
        start = tl.maximum(start, (tl.maximum(context - window, 0) // KEYS) * KEYS)
    table = tables + tl.load(table_start + row)
    is_whole = tl.load(row_work + row + 1) - tl.load(row_work + row) == 1
    start_early(EARLY)
    if not is_used:
        return
    of_group = tl.arange(0, QUERIES)
    at = tl.arange(0, WIDTH)
    head = kv_head * group + of_group
    wanted = (of_group < group)[:, None] & (at < DIM)[None, :]
    rows = query + row.to(tl.int64) * query_stride + head[:, None] * DIM + at[None, :]
    q = tl.load(rows, mask=wanted, other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, WIDTH], tl.float32)
    plane: tl.constexpr = BLOCK_TOKENS * KV_HEADS * DIM
    # Slots are read one iteration ahead: a load that depends on a slot read in the same
    # iteration is not pipelined.
    slot = tl.load(table + start // BLOCK_TOKENS).to(tl.int64)
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        key = first + tl.arange(0, KEYS)
        seen = key < end
        if BLOCK_TOKENS % KEYS == 0:
            place = slot * block_stride + layer_at + (key % BLOCK_TOKENS) * (KV_HEADS * DIM)
            after = tl.minimum(first + KEYS, end - 1)
            slot = tl.load(table + after // BLOCK_TOKENS).to(tl.int64)
        else:
            slots = tl.load(table + key // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
            place = slots * block_stride + layer_at + (key % BLOCK_TOKENS) * (KV_HEADS * DIM)
        place += kv_head * DIM
        inside = seen[:, None] & (at < DIM)[None, :]
        beside = (at < DIM)[:, None] & seen[None, :]
        k = tl.load(pool + place[None, :] + at[:, None], mask=beside, other=0.0)
        v = tl.load(pool + plane + place[:, None] + at[None, :], mask=inside, other=0.0)
        if EXACT:
            scores = tl.dot(q, k, input_precision="ieee") * scaling
        else:
            scores = tl.dot(q, k) * scaling
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        # log2(e): powers of two are one instruction, powers of e are not.
        scores = scores * 1.4426950408889634
        if WINDOWED:
            seen = seen & (key >= context - window)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # If nothing was seen yet, the maximum is -infinity, and -infinity minus itself is NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        summed = summed * decay[:, None]
        if EXACT:
            summed = tl.dot(weights, v, summed, input_precision="ieee")
        else:
            summed = tl.dot(weights.to(v.dtype), v, summed)
        highest = higher
    if SINKS:
        # Counted once per row, by the program that finishes it.
        sink = tl.load(sinks + head, mask=of_group < group, other=0.0).to(tl.float32)
        sink = tl.where(is_whole, sink * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(highest, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(highest - base)
        total = total * decay + tl.exp2(sink - base)
        summed = summed * decay[:, None]
        highest = higher
    result = summed / tl.where(total == 0, 1.0, total)[:, None]
    if is_whole:
        done = row.to(tl.int64) * (HEADS * DIM) + head[:, None] * DIM + at[None, :]
        tl.store(out + done, result, mask=wanted)
    else:
        part = item.to(tl.int64) * HEADS + head
        tl.store(partial + part[:, None] * DIM + at[None, :], result, mask=wanted)
        # The logarithm of the sum of weights: with it `_join` weighs this piece among the
        # others.
        level = tl.where(total == 0, float("-inf"), highest + tl.log2(total))
        tl.store(partial_lse + part, level, mask=of_group < group)


@triton.jit
def _join(
    row_work,
    partial,
    partial_lse,
    sinks,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0)
    begin = tl.load(row_work + row)
    end = tl.load(row_work + row + 1)
    start_early(EARLY)
    if end - begin == 1:
        return
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    there = head < HEADS
    at = tl.arange(0, WIDTH)
    inside = there[:, None] & (at < DIM)[None, :]
    highest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    summed = tl.zeros([GROUP, WIDTH], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32)
        highest = sink * 1.4426950408889634
        total = total + 1.0
    for first in range(begin, end, PIECES):
        item = first + tl.arange(0, PIECES)
        known = (item < end)[:, None] & there[None, :]
        place = item[:, None] * HEADS + head[None, :]
        level = tl.load(partial_lse + place, mask=known, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(level, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(level - base[None, :])
        wanted = known[:, :, None] & (at < DIM)[None, None, :]
        values = tl.load(
            partial + place[:, :, None] * DIM + at[None, None, :], mask=wanted, other=0.0
        )
        decay = tl.exp2(highest - base)
        summed = summed * decay[:, None] + tl.sum(values * weight[:, :, None], 0)
        total = total * decay + tl.sum(weight, 0)
        highest = higher
    result = summed / tl.where(total == 0, 1.0, total)[:, None]
    place_out = row.to(tl.int64) * (HEADS * DIM) + head[:, None] * DIM + at[None, :]
    tl.store(out + place_out, result, mask=inside)


def attend_decodes(
    query: Tensor, pool: Tensor, layer: int, work: DecodeWork, variant: Variant, out: Tensor
) -> None:
    """Attention of one token per row; `query` is `[rows, >= heads * dim]`, `out` `[rows, heads, dim]`.

    Over a pool of latents, `out` has the size of a latent. K and V of the rows' own
    tokens are already in the pool. The output of padding rows (context 0) is undefined and must
    not be read.
    """
    if pool.shape[2] == 1:
        kernel = latent.attend_decodes
        if latent_fp8.fits(query, pool, out.shape[-1]):
            kernel = latent_fp8.attend_pieces
        kernel(query, pool, layer, work, variant, out)
        _join_pieces(work, out, out)
        return
    if decode_tma.fits(pool, variant, out):
        decode_tma.attend_decodes(query, pool, layer, work, variant, out)
        return
    if pool.element_size() == 1:
        decode_fp8.attend_pieces(query, pool, layer, work, variant, out)
    else:
        _attend_pieces(query, pool, layer, work, variant, out)
    sinks = out if variant.sinks is None else variant.sinks
    _join_pieces(work, sinks, out, has_sinks=variant.sinks is not None)


def _attend_pieces(
    query: Tensor, pool: Tensor, layer: int, work: DecodeWork, variant: Variant, out: Tensor
) -> None:
    """Attend each piece separately; a row with one piece is finished by that."""
    block_tokens, kv_heads, dim = pool.shape[3:]
    heads = out.shape[1]
    sinks = out if variant.sinks is None else variant.sinks
    width = max(16, triton.next_power_of_2(dim))
    exact = query.element_size() == 4
    keys = 32 if exact else 64
    early = starts_early(query, is_short=True)
    _attend[(kv_heads, len(work.work_row))](
        query,
        pool,
        *work.lists,
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
        KEYS=keys,
        QUERIES=max(16, triton.next_power_of_2(heads // kv_heads)),
        WIDTH=width,
        WINDOWED=variant.window is not None,
        CAPPED=variant.softcap is not None,
        SINKS=variant.sinks is not None,
        EXACT=exact,
        STAGES=2,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )


def _join_pieces(
    work: DecodeWork, sinks: Tensor, out: Tensor, *, has_sinks: bool = False
) -> None:
    """Join the partial results of rows with several pieces."""
    heads, dim = out.shape[1:]
    # Few rows have many pieces. Among many rows most have one piece, and there is nothing to
    # join.
    group, at_once, warps = (1, 8, 2) if len(out) <= 64 else (4, 2, 2)
    if dim > _MAX_NARROW:  # a latent is as wide as several heads
        group, at_once, warps = (1, 16, 8) if len(out) <= 64 else (4, 2, 4)
    early = starts_early(out, is_short=True)
    _join[(len(out), triton.cdiv(heads, group))](
        work.row_work,
        work.partial,
        work.partial_lse,
        sinks,
        out,
        HEADS=heads,
        DIM=dim,
        GROUP=group,
        PIECES=at_once,
        WIDTH=max(16, triton.next_power_of_2(dim)),
        SINKS=has_sinks,
        EARLY=early,
        num_warps=warps,
        launch_pdl=early,
    )
