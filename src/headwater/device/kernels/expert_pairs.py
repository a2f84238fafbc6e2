"""Products of few rows with the experts they were routed to.

With few rows, the time is that of reading weights, so each pair of a row and an expert is computed
separately. `expert_groups` has the products of more rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import activate
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.experts import ExpertWeights

MAX_PAIR_ROWS = 4
"""Largest batch for which each pair is computed separately."""

_FP8_SHAPE = 8, 512
"""Outputs and inputs of a tile of gate and up for weights in FP8: the fastest of 9 on an H200."""


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
    n, k = (4, 1024) if weights.scaling == 0 else _FP8_SHAPE
    across = 8 if weights.scaling == 2 else 4
    early = starts_early(x)
    _pair_gate_up[(triton.cdiv(inner, n), rows * top)](
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
        N=n,
        K=min(k, triton.next_power_of_2(size)),
        NORMED=norm is not None,
        INTERLEAVED=weights.is_interleaved,
        BIASED=weights.gate_up_bias is not None,
        ACTIVATION=int(weights.activation),
        SCALING=weights.scaling,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    _pair_down[(triton.cdiv(size, across), rows)](
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
        N=across,
        K=min(1024, triton.next_power_of_2(inner)),
        BIASED=weights.down_bias is not None,
        SCALING=weights.scaling,
        STAGES=3,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
