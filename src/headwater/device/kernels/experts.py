"""GEMMs of tokens with the weights of the experts they were routed to.

With few rows, the time is that of reading weights: `_pair_gate_up` and `_pair_down` compute
each pair of a row and an expert separately. With more rows, `_grouped` computes the rows of an
expert together, in tiles. Below 64 rows a tile is computed transposed, `[outputs, rows]`,
because the longer side of the tensor cores is 64 and padding rows cost little on the other
side.

Weights in FP8 are multiplied as dense layers do it. With a scale for each line, rows are quantised
too and the FP8 tensor cores are used. With a scale for each block, weights are converted in registers;
a tile is within one block of outputs, and an iteration within one block of inputs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import GateActivation, activate
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.quantized import Code, quantize_rows
from headwater.device.kernels.routing import Routing

MAX_PAIR_ROWS = 4
"""Largest batch for which each pair is computed separately."""

_SHAPES = {
    16: (64, 128, 3, 4),
    32: (64, 64, 4, 4),
    64: (64, 64, 4, 4),
    128: (128, 64, 4, 8),
}
"""Tile shapes by the rows of a tile: outputs, inputs per iteration, iterations read ahead, and
warps."""

_FP8_SHAPES = {
    16: (64, 128, 4, 4),
    32: (64, 128, 4, 4),
    64: (64, 128, 3, 4),
    128: (128, 128, 3, 8),
}
"""The same for weights in FP8, which have half the bytes."""

_EXACT_SHAPE = 64, 32, 2, 4
"""Tile shape for float32."""

SCALE_BLOCK = 128
"""Outputs and inputs that share a scale, if weights in FP8 have one for each block."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """Weights of all experts of a layer."""

    gate_up: Tensor
    """`[experts, 2 * inner, size]`: rows of gate, then of up, or both interleaved."""

    down: Tensor
    """`[experts, size, inner]`."""

    code: Code | None = None
    """How weights are stored, if they are quantised: MXFP4, or FP8 by row or by block."""

    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    """Of MXFP4, exponents for each 32 inputs; `mx_experts` uses them. Of FP8, `[experts, lines]`,
    or `[experts, parts, blocks of outputs, blocks of inputs]`, float32; gate and up are two
    parts."""

    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    is_interleaved: bool = False
    """Whether rows of gate and up are interleaved."""

    activation: GateActivation = GateActivation.SILU
    alpha: float = 1.702
    limit: float = 7.0
    """Parameters of the clamped activation."""

    @property
    def is_mxfp4(self) -> bool:
        return self.code is Code.MXFP4

    @property
    def scaling(self) -> int:
        """What has a scale in FP8: 1 for each line, 2 for each block; 0 for other weights."""
        if self.code is Code.FP8_ROW:
            return 1
        return 2 if self.code is Code.FP8_GROUP else 0

    @property
    def inner(self) -> int:
        """Number of outputs of the gate projection."""
        return self.gate_up.shape[1] // 2


@triton.jit
def _dot(weights, rows, acc, scale, SCALING: tl.constexpr, SUMS: tl.constexpr,
         FEW: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """`acc` plus the product of a tile. A `scale` of the whole tile multiplies the sums if
    `SUMS`, otherwise the weights: what there is less of."""
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
    that of `ExpertWeights`; rows are `QUANTIZED` with `x_scales`.
    """
    expert = tl.program_id(1)
    count = tl.load(counts + expert)
    if count == 0:
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
    for first in range(0, count, M):
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
def _pair_gate_up(x, weight, scales, bias, norm_weight, ids, out, epsilon, alpha, limit,
                  SIZE: tl.constexpr, OUTPUTS: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr,
                  K: tl.constexpr, NORMED: tl.constexpr, INTERLEAVED: tl.constexpr,
                  BIASED: tl.constexpr, ACTIVATION: tl.constexpr, SCALING: tl.constexpr,
                  EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    output = tl.program_id(0) * N + tl.arange(0, N)
    inside = output < OUTPUTS
    # Outputs after the end repeat output 0 and are not stored, so loads of weights need no
    # mask.
    output = tl.where(inside, output, 0)
    line = output
    other = output + OUTPUTS
    if INTERLEAVED:
        line = output * 2
        other = output * 2 + 1
    whole = weight + expert * (2 * OUTPUTS * SIZE)
    left = tl.zeros([N, K], tl.float32)
    right = tl.zeros([N, K], tl.float32)
    # The scale of the norm is one number per row, so it is applied to the sums: the row is read
    # only once.
    squares = tl.zeros([K], tl.float32)
    for first in range(0, SIZE, K):
        at = first + tl.arange(0, K)
        within = at < SIZE
        gate = tl.load(
            whole + line[:, None] * SIZE + at[None, :], mask=within[None, :], other=0.0
        )
        up = tl.load(
            whole + other[:, None] * SIZE + at[None, :], mask=within[None, :], other=0.0
        )
        values = tl.load(x + (pair // TOP) * SIZE + at, mask=within, other=0.0).to(tl.float32)
        if NORMED:
            squares += values * values
            values = values * tl.load(norm_weight + at, mask=within, other=0.0).to(tl.float32)
        up_values = values
        if SCALING == 2:
            # All outputs of a program are within one block.
            columns: tl.constexpr = (SIZE + 127) // 128
            blocks: tl.constexpr = (OUTPUTS + 127) // 128 * columns
            of_block = scales + expert * (2 * blocks) + tl.program_id(0) * N // 128 * columns
            of_block += at // 128
            up_values = values * tl.load(of_block + blocks, mask=within, other=0.0)
            values = values * tl.load(of_block, mask=within, other=0.0)
        left += gate.to(tl.float32) * values[None, :]
        right += up.to(tl.float32) * up_values[None, :]
    gated = tl.sum(left, 1)
    raised = tl.sum(right, 1)
    if SCALING == 1:
        gated *= tl.load(scales + expert * (2 * OUTPUTS) + line)
        raised *= tl.load(scales + expert * (2 * OUTPUTS) + other)
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + epsilon)
        gated = gated * scale
        raised = raised * scale
    if BIASED:
        gated += tl.load(bias + expert * (2 * OUTPUTS) + line).to(tl.float32)
        raised += tl.load(bias + expert * (2 * OUTPUTS) + other).to(tl.float32)
    result = activate(gated, raised, alpha, limit, ACTIVATION)
    tl.store(out + pair * OUTPUTS + output, result, mask=inside)


@triton.jit
def _pair_down(x, weight, scales, bias, ids, shares, hidden, SIZE: tl.constexpr,
               OUTPUTS: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
               BIASED: tl.constexpr, SCALING: tl.constexpr, STAGES: tl.constexpr,
               EARLY: tl.constexpr):  # fmt: skip
    """All experts of one row, added to the residual without partial results."""
    start_early(EARLY)
    row = tl.program_id(1)
    output = tl.program_id(0) * N + tl.arange(0, N)
    inside = output < OUTPUTS
    output = tl.where(inside, output, 0)
    acc = tl.zeros([N, K], tl.float32)
    biases = tl.zeros([N], tl.float32)
    turns: tl.constexpr = (SIZE + K - 1) // K
    # One loop over experts and inputs together, so that loads of the next expert begin early.
    for turn in tl.range(0, TOP * turns, num_stages=STAGES):
        pair = row * TOP + turn // turns
        at = (turn % turns) * K + tl.arange(0, K)
        within = at < SIZE
        expert = tl.load(ids + pair).to(tl.int64)
        share = tl.load(shares + pair)
        w = tl.load(
            weight + (expert * OUTPUTS + output[:, None]) * SIZE + at[None, :],
            mask=within[None, :],
            other=0.0,
        ).to(tl.float32)
        values = tl.load(x + pair * SIZE + at, mask=within, other=0.0).to(tl.float32) * share
        if SCALING == 1:
            w = w * tl.load(scales + expert * OUTPUTS + output)[:, None]
        if SCALING == 2:  # all outputs of a program are within one block
            columns: tl.constexpr = (SIZE + 127) // 128
            blocks: tl.constexpr = (OUTPUTS + 127) // 128
            of_block = scales + (expert * blocks + tl.program_id(0) * N // 128) * columns
            values = values * tl.load(of_block + at // 128, mask=within, other=0.0)
        acc += w * values[None, :]
        if BIASED:
            # A bias counts once per expert: with the first of the inputs.
            share = tl.where(turn % turns == 0, share, 0.0)
            biases += share * tl.load(bias + expert * OUTPUTS + output).to(tl.float32)
    place = hidden + row * OUTPUTS + output
    result = tl.load(place, mask=inside, other=0.0).to(tl.float32) + tl.sum(acc, 1) + biases
    tl.store(place, result, mask=inside)


@triton.jit
def _combine(pairs, hidden, SIZE: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Add the results of a row's pairs, in order, to the residual."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    total = tl.load(hidden + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    for number in tl.static_range(TOP):
        place = pairs + (row * TOP + number) * SIZE + at
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(hidden + row * SIZE + at, total, mask=inside)


def add_pairs(
    x: Tensor,
    hidden: Tensor,
    weights: ExpertWeights,
    ids: Tensor,
    shares: Tensor,
    norm: tuple[Tensor, float] | None = None,
) -> None:
    """Add the experts' results for few rows to `hidden`; `x` is normalised first if `norm` is
    given."""
    rows, size = x.shape
    top, inner = ids.shape[1], weights.down.shape[2]
    narrow = torch.empty((rows * top, inner), dtype=x.dtype, device=x.device)
    norm_weight, epsilon = norm or (x, 0.0)
    k = min(1024, triton.next_power_of_2(size))
    early = starts_early(x)
    _pair_gate_up[(triton.cdiv(inner, 4), rows * top)](
        x,
        weights.gate_up,
        x if weights.gate_up_scales is None else weights.gate_up_scales,
        x if weights.gate_up_bias is None else weights.gate_up_bias,
        norm_weight,
        ids,
        narrow,
        epsilon,
        weights.alpha,
        weights.limit,
        SIZE=size,
        OUTPUTS=inner,
        TOP=top,
        N=4,
        K=k,
        NORMED=norm is not None,
        INTERLEAVED=weights.is_interleaved,
        BIASED=weights.gate_up_bias is not None,
        ACTIVATION=int(weights.activation),
        SCALING=weights.scaling,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    _pair_down[(triton.cdiv(size, 4), rows)](
        narrow,
        weights.down,
        x if weights.down_scales is None else weights.down_scales,
        x if weights.down_bias is None else weights.down_bias,
        ids,
        shares,
        hidden,
        SIZE=inner,
        OUTPUTS=size,
        TOP=top,
        N=4,
        K=min(1024, triton.next_power_of_2(inner)),
        BIASED=weights.down_bias is not None,
        SCALING=weights.scaling,
        STAGES=3,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )


def add_grouped(
    normed: Tensor, hidden: Tensor, weights: ExpertWeights, routing: Routing
) -> None:
    """Add the experts' results for rows of `normed` to `hidden`."""
    rows, size = normed.shape
    experts, _, inner = weights.down.shape
    top = routing.ids.shape[1]
    narrow = normed.new_empty((rows * top, inner))
    wide = normed.new_empty((rows * top, size))
    tile = tile_rows(rows * top, experts)
    common = {"TOP": top, "EXACT": normed.element_size() == 4, "SCALING": weights.scaling}
    _launch(normed, weights.gate_up, weights.gate_up_scales, weights.gate_up_bias, narrow,
            routing, tile, weights, GATED=True, **common)  # fmt: skip
    _launch(narrow, weights.down, weights.down_scales, weights.down_bias, wide,
            routing, tile, weights, GATED=False, **common)  # fmt: skip
    combine_pairs(wide, hidden, top)


def combine_pairs(wide: Tensor, hidden: Tensor, top: int) -> None:
    """Add the results of the pairs of each row to `hidden`."""
    rows, size = hidden.shape
    block = min(1024, triton.next_power_of_2(size))
    _combine[(rows, triton.cdiv(size, block))](wide, hidden, SIZE=size, TOP=top, BLOCK=block)


def _launch(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    routing: Routing,
    tile: int,
    weights: ExpertWeights,
    **flags: int,
) -> None:
    size, outputs = x.shape[1], out.shape[1]
    is_exact = x.element_size() == 4
    shapes = _SHAPES if scales is None else _FP8_SHAPES
    n, k, stages, warps = _EXACT_SHAPE if is_exact else shapes[tile]
    is_quantized = weights.code is Code.FP8_ROW and not is_exact
    x_scales = x
    if is_quantized:
        x, x_scales = quantize_rows(x)
    _grouped[(triton.cdiv(outputs, n), len(weight))](
        x,
        weight,
        x if bias is None else bias,
        routing.weights,
        x_scales,
        x if scales is None else scales,
        routing.lists,
        routing.counts,
        out,
        routing.lists.shape[1],
        weights.alpha,
        weights.limit,
        SIZE=size,
        OUTPUTS=outputs,
        M=tile,
        N=n,
        K=k,
        # Weights that are converted in registers must be the first factor.
        FEW=tile < 64 or weights.code is Code.FP8_GROUP,
        QUANTIZED=is_quantized,
        INTERLEAVED=weights.is_interleaved,
        BIASED=bias is not None,
        ACTIVATION=int(weights.activation),
        STAGES=stages,
        num_warps=warps,
        **flags,
    )


def tile_rows(num_pairs: int, experts: int) -> int:
    """Rows of a tile: about the average number of rows of an expert."""
    for tile, most in ((16, 12), (32, 24), (64, 96)):
        if num_pairs <= most * experts:
            return tile
    return 128
