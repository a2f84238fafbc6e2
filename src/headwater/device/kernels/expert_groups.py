"""GEMMs of tokens with the weights of the experts they were routed to.

The rows of an expert are computed together, in tiles. Below 64 rows a tile is computed
transposed, `[outputs, rows]`, because the longer side of the tensor cores is 64 and padding
rows cost little on the other side.

Weights in FP8 are multiplied as dense layers do it. With a scale for each line, rows are quantised
too and the FP8 tensor cores are used. With a scale for each block, weights are converted in registers;
a tile is within one block of outputs, and an iteration within one block of inputs.
"""

import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import activate
from headwater.device.kernels.early import (
    MAX_EARLY_EXPERT_ROWS,
    start_early,
    starts_early,
)
from headwater.device.kernels.experts import ExpertWeights
from headwater.device.kernels.quantized import Code, quantize_rows
from headwater.device.kernels.routing import Routing

_SHAPES = {
    16: (64, 128, 3, 4),
    32: (64, 64, 4, 4),
    64: (64, 64, 4, 4),
    128: (128, 64, 4, 8),
}
"""Tile shapes by the rows of a tile: outputs, inputs per iteration, iterations read ahead, and
warps."""

_FP8_SHAPES = {
    16: (64, 128, 3, 4),
    32: (64, 128, 3, 4),
    64: (64, 128, 3, 4),
    128: (128, 128, 3, 8),
}
"""The same for weights in FP8, which have half the bytes."""

_MAX_ROW_PROGRAMS = 16

_EXACT_SHAPE = 64, 32, 2, 4
"""Tile shape for float32."""


@triton.jit
def _dot(weights, rows, acc, scale, SCALING: tl.constexpr, SUMS: tl.constexpr,
         FEW: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """`acc` plus the product of a tile. A `scale` of the whole tile multiplies the sums if
    `SUMS`, otherwise the weights: the smaller of the two."""
    if SCALING == 2 and SUMS:
        part = tl.zeros(acc.shape, tl.float32)
        acc += _add_dot(weights.to(rows.dtype), rows, part, FEW, EXACT) * scale
    else:
        if SCALING == 2:
            weights = weights.to(tl.float32) * scale
        acc = _add_dot(weights.to(rows.dtype), rows, acc, FEW, EXACT)
    return acc


@triton.jit
def _add_dot(weights, rows, acc, FEW: tl.constexpr, EXACT: tl.constexpr):
    if FEW:
        if EXACT:
            acc = tl.dot(weights, tl.trans(rows), acc, input_precision="ieee")
        else:
            acc = tl.dot(weights, tl.trans(rows), acc)
    elif EXACT:
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(weights), acc)
    return acc


@triton.jit(do_not_specialize=["capacity"])
def _grouped(x, weight, bias, shares, x_scales, scales, lists, counts, out, capacity, alpha,
             limit, SIZE: tl.constexpr, OUTPUTS: tl.constexpr, TOP: tl.constexpr,
             M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FEW: tl.constexpr,
             GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr,
             ACTIVATION: tl.constexpr, SCALING: tl.constexpr, QUANTIZED: tl.constexpr,
             EXACT: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """A tile of outputs of one expert, for all rows routed to it.

    `GATED`: rows of `x` are tokens, and `weight` has gate and up. Otherwise rows of `x` are
    pairs, and results are multiplied by the pair's routing weight, one of `shares`. `SCALING` is
    that of `ExpertWeights`; rows are `QUANTIZED` with `x_scales`. The programs of a tile of outputs
    share the tiles of rows.
    """
    expert = tl.program_id(2)
    count = tl.load(counts + expert)
    begin = tl.program_id(1) * M
    if begin >= count:
        return
    output = tl.program_id(0) * N + tl.arange(0, N)
    inside = output < OUTPUTS
    lines: tl.constexpr = OUTPUTS * 2 if GATED else OUTPUTS
    line = output
    other = output
    if GATED:
        if INTERLEAVED:
            line = output * 2
            other = output * 2 + 1
        else:
            other = output + OUTPUTS
    whole = weight + expert.to(tl.int64) * lines * SIZE
    left = whole + line[:, None] * SIZE
    right = whole + other[:, None] * SIZE
    columns: tl.constexpr = (SIZE + 127) // 128
    blocks: tl.constexpr = (OUTPUTS + 127) // 128 * columns
    parts: tl.constexpr = 2 if GATED else 1
    of_block = scales + expert * (parts * blocks) + tl.program_id(0) * N // 128 * columns
    scale = 1.0
    up_scale = 1.0
    for first in range(begin, count, M * tl.num_programs(1)):
        member = first + tl.arange(0, M)
        there = member < count
        pair = tl.load(lists + expert * capacity + member, mask=there, other=0)
        source = pair
        if GATED:
            source = pair // TOP
        rows = x + source.to(tl.int64)[:, None] * SIZE
        if FEW:
            acc = tl.zeros([N, M], tl.float32)
            acc_up = tl.zeros([N, M], tl.float32)
        else:
            acc = tl.zeros([M, N], tl.float32)
            acc_up = tl.zeros([M, N], tl.float32)
        if SCALING == 2:
            next_scale = tl.load(of_block)
            next_up = tl.load(of_block + (parts - 1) * blocks)
        for at in tl.range(0, SIZE, K, num_stages=STAGES):
            k = at + tl.arange(0, K)
            if SCALING == 2:
                # Scales are read one iteration ahead: loads of single numbers are not pipelined.
                scale = next_scale
                up_scale = next_up
                column = tl.minimum(at + K, SIZE - 1) // 128
                next_scale = tl.load(of_block + column)
                next_up = tl.load(of_block + (parts - 1) * blocks + column)
            if SIZE % K == 0:
                values = tl.load(rows + k[None, :], mask=there[:, None], other=0.0)
                w = tl.load(left + k[None, :], mask=inside[:, None], other=0.0)
            else:
                within = (k < SIZE)[None, :]
                values = tl.load(rows + k[None, :], mask=there[:, None] & within, other=0.0)
                w = tl.load(left + k[None, :], mask=inside[:, None] & within, other=0.0)
            acc = _dot(w, values, acc, scale, SCALING, M <= 32, FEW, EXACT)
            if GATED:
                if SIZE % K == 0:
                    up = tl.load(right + k[None, :], mask=inside[:, None], other=0.0)
                else:
                    up = tl.load(
                        right + k[None, :],
                        mask=inside[:, None] & (k < SIZE)[None, :],
                        other=0.0,
                    )
                acc_up = _dot(up, values, acc_up, up_scale, SCALING, M <= 32, FEW, EXACT)
        if QUANTIZED:
            of_row = tl.load(x_scales + source, mask=there, other=0.0)
            of_row = of_row[None, :] if FEW else of_row[:, None]
            acc = acc * of_row
            acc_up = acc_up * of_row
        if SCALING == 1:
            of_line = tl.load(scales + expert * lines + line, mask=inside, other=0.0)
            acc = acc * (of_line[:, None] if FEW else of_line[None, :])
            if GATED:
                of_up = tl.load(scales + expert * lines + other, mask=inside, other=0.0)
                acc_up = acc_up * (of_up[:, None] if FEW else of_up[None, :])
        if BIASED:
            of_line = tl.load(bias + expert * lines + line, mask=inside, other=0.0).to(
                tl.float32
            )
            acc += of_line[:, None] if FEW else of_line[None, :]
            if GATED:
                of_up = tl.load(bias + expert * lines + other, mask=inside, other=0.0)
                of_up = of_up.to(tl.float32)
                acc_up += of_up[:, None] if FEW else of_up[None, :]
        if GATED:
            acc = activate(acc, acc_up, alpha, limit, ACTIVATION)
        else:
            share = tl.load(shares + pair, mask=there, other=0.0)
            acc = acc * (share[None, :] if FEW else share[:, None])
        target = out + pair.to(tl.int64) * OUTPUTS
        if FEW:
            tl.store(
                target[None, :] + output[:, None], acc, mask=inside[:, None] & there[None, :]
            )
        else:
            tl.store(
                target[:, None] + output[None, :], acc, mask=there[:, None] & inside[None, :]
            )


@triton.jit
def _combine(pairs, hidden, SIZE: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    """Add the results of a row's pairs, in order, to the residual."""
    start_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    total = tl.load(hidden + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    for number in tl.static_range(TOP):
        place = pairs + (row * TOP + number) * SIZE + at
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(hidden + row * SIZE + at, total, mask=inside)


def add_grouped(
    normed: Tensor, hidden: Tensor, weights: ExpertWeights, routing: Routing
) -> None:
    """Add the experts' results for rows of `normed` to `hidden`."""
    rows, size = normed.shape
    top = routing.ids.shape[1]
    narrow = normed.new_empty((rows * top, weights.inner))
    wide = normed.new_empty((rows * top, size))
    multiply_grouped(normed, weights, routing, narrow, is_gated=True)
    multiply_grouped(narrow, weights, routing, wide, is_gated=False)
    combine_pairs(wide, hidden, top)


def combine_pairs(wide: Tensor, hidden: Tensor, top: int) -> None:
    """Add the results of the pairs of each row to `hidden`."""
    rows, size = hidden.shape
    block = min(1024, triton.next_power_of_2(size))
    early = starts_early(hidden, most=MAX_EARLY_EXPERT_ROWS)
    _combine[(rows, triton.cdiv(size, block))](
        wide, hidden, SIZE=size, TOP=top, BLOCK=block, EARLY=early, launch_pdl=early
    )


def multiply_grouped(
    x: Tensor,
    weights: ExpertWeights,
    routing: Routing,
    out: Tensor,
    *,
    is_gated: bool,
    experts: int | None = None,
) -> None:
    """The product with gate and up if `is_gated`, otherwise with down, for each pair. `experts` is
    the number of all experts, if `weights` and `routing` have only some of them."""
    size, outputs = x.shape[1], out.shape[1]
    weight, scales, bias = weights.part(is_gated=is_gated)
    top = routing.ids.shape[1]
    is_exact = x.element_size() == 4
    num_pairs, num_experts = routing.ids.numel(), experts or len(weight)
    tile = tile_rows(num_pairs, num_experts)
    shapes = _SHAPES if scales is None else _FP8_SHAPES
    n, k, stages, warps = _EXACT_SHAPE if is_exact else shapes[tile]
    is_quantized = weights.code is Code.FP8_ROW and not is_exact
    x_scales = x
    if is_quantized:
        x, x_scales = quantize_rows(x)
    shared = row_programs(num_pairs, num_experts, tile)
    _grouped[(triton.cdiv(outputs, n), shared, len(weight))](
        x, weight, x if bias is None else bias, routing.weights, x_scales,
        x if scales is None else scales, routing.lists, routing.counts, out,
        routing.lists.shape[1], weights.alpha, weights.limit,
        SIZE=size, OUTPUTS=outputs, TOP=top, M=tile, N=n, K=k,
        # Weights that are converted in registers must be the first factor.
        FEW=tile < 64 or weights.code is Code.FP8_GROUP,
        GATED=is_gated, INTERLEAVED=weights.is_interleaved, BIASED=bias is not None,
        ACTIVATION=int(weights.activation), SCALING=weights.scaling, QUANTIZED=is_quantized,
        EXACT=is_exact, STAGES=stages, num_warps=warps,
    )  # fmt: skip


def row_programs(num_pairs: int, experts: int, tile: int) -> int:
    """Programs that share the tiles of rows of an expert: about the average number of tiles, so
    that an expert with many rows does not take long after all others."""
    return max(1, min(_MAX_ROW_PROGRAMS, num_pairs // (experts * tile)))


def tile_rows(num_pairs: int, experts: int) -> int:
    """Rows of a tile: about the average number of rows of an expert."""
    for tile, most in ((16, 12), (32, 24), (64, 96)):
        if num_pairs <= most * experts:
            return tile
    return 128
