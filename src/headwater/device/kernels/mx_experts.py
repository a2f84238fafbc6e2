"""GEMMs of tokens with experts whose weights are MXFP4, kept packed: the forms of `experts`.

Weights are `[experts, outputs, inputs / 2]` bytes in the order of `quantized`, with an exponent for
each 32 inputs of an output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import activate
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.experts import ExpertWeights, combine_pairs, tile_rows
from headwater.device.kernels.quantized import e2m1_numbers, multiply_groups
from headwater.device.kernels.routing import Routing

_GROUP = 32
_HALF = 16


@triton.jit
def _pair_gate_up(x, weight, scales, bias, norm_weight, ids, out, epsilon, alpha, limit,
                  SIZE: tl.constexpr, OUTPUTS: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr,
                  GROUPS: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
                  ACTIVATION: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    output = tl.program_id(0) * N + tl.arange(0, N)
    inside = output < OUTPUTS
    output = tl.where(inside, output, 0)
    line = output * 2
    whole = weight + expert * (OUTPUTS * SIZE)
    all_scales = scales + expert * (2 * OUTPUTS * (SIZE // 32))
    left = tl.zeros([N, GROUPS, 16], tl.float32)
    right = tl.zeros([N, GROUPS, 16], tl.float32)
    squares = tl.zeros([GROUPS, 16], tl.float32)
    in_group = tl.arange(0, 16)
    for first in range(0, SIZE // 32, GROUPS):
        group = first + tl.arange(0, GROUPS)
        there = group < SIZE // 32
        at = group[:, None] * 32 + in_group[None, :]
        source = x + (pair // TOP) * SIZE + at
        low = tl.load(source, mask=there[:, None], other=0.0).to(tl.float32)
        high = tl.load(source + 16, mask=there[:, None], other=0.0).to(tl.float32)
        if NORMED:
            squares += low * low + high * high
            norm_at = norm_weight + at
            low = low * tl.load(norm_at, mask=there[:, None], other=0.0).to(tl.float32)
            high = high * tl.load(norm_at + 16, mask=there[:, None], other=0.0).to(tl.float32)
        left = multiply_groups(left, whole, all_scales, all_scales, line, group, in_group, there,
                               low, high, SIZE, 32, 16, 3, False, ASM)  # fmt: skip
        right = multiply_groups(right, whole, all_scales, all_scales, line + 1, group, in_group,
                                there, low, high, SIZE, 32, 16, 3, False, ASM)  # fmt: skip
    gate = tl.sum(tl.sum(left, 2), 1)
    up = tl.sum(tl.sum(right, 2), 1)
    if NORMED:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / SIZE + epsilon)
        gate = gate * scale
        up = up * scale
    if BIASED:
        gate += tl.load(bias + expert * (2 * OUTPUTS) + line).to(tl.float32)
        up += tl.load(bias + expert * (2 * OUTPUTS) + line + 1).to(tl.float32)
    result = activate(gate, up, alpha, limit, ACTIVATION)
    tl.store(out + pair * OUTPUTS + output, result, mask=inside)


@triton.jit
def _pair_down(x, weight, scales, bias, ids, shares, hidden, SIZE: tl.constexpr,
               OUTPUTS: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
               BIASED: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """All experts of one row, added to the residual."""
    start_early(EARLY)
    row = tl.program_id(1)
    output = tl.program_id(0) * N + tl.arange(0, N)
    inside = output < OUTPUTS
    output = tl.where(inside, output, 0)
    acc = tl.zeros([N, GROUPS, 16], tl.float32)
    biases = tl.zeros([N], tl.float32)
    in_group = tl.arange(0, 16)
    turns: tl.constexpr = (SIZE // 32 + GROUPS - 1) // GROUPS
    for turn in range(TOP * turns):
        pair = row * TOP + turn // turns
        group = (turn % turns) * GROUPS + tl.arange(0, GROUPS)
        there = group < SIZE // 32
        expert = tl.load(ids + pair).to(tl.int64)
        share = tl.load(shares + pair)
        source = x + pair * SIZE + group[:, None] * 32 + in_group[None, :]
        low = tl.load(source, mask=there[:, None], other=0.0).to(tl.float32) * share
        high = tl.load(source + 16, mask=there[:, None], other=0.0).to(tl.float32) * share
        whole = weight + expert * (OUTPUTS * (SIZE // 2))
        all_scales = scales + expert * (OUTPUTS * (SIZE // 32))
        acc = multiply_groups(acc, whole, all_scales, all_scales, output, group, in_group, there,
                              low, high, SIZE, 32, 16, 3, False, ASM)  # fmt: skip
        if BIASED:
            # A bias counts once per expert: with the first of the inputs.
            share = tl.where(turn % turns == 0, share, 0.0)
            biases += share * tl.load(bias + expert * OUTPUTS + output).to(tl.float32)
    place = hidden + row * OUTPUTS + output
    result = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, result + tl.sum(tl.sum(acc, 2), 1) + biases, mask=inside)


@triton.jit
def _tile(weight, scales, line, first, SIZE: tl.constexpr, G: tl.constexpr, KIND: tl.constexpr):
    """Elements of `G` groups of inputs: those of their first halves, and of their second
    halves."""
    group = first + tl.arange(0, G)
    there = (group < SIZE // 32)[None, :]
    in_group = tl.arange(0, 16)
    place = line[:, None, None] * (SIZE // 2) + group[None, :, None] * 16
    code = tl.load(weight + place + in_group[None, None, :], mask=there[:, :, None], other=0)
    code = code.to(tl.int32)
    exponent = tl.load(
        scales + line[:, None] * (SIZE // 32) + group[None, :], mask=there, other=0
    )
    scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, :, None]
    low = (e2m1_numbers(code & 15) * scale).to(KIND)
    high = (e2m1_numbers(code >> 4) * scale).to(KIND)
    return tl.reshape(low, (line.shape[0], G * 16)), tl.reshape(high, (line.shape[0], G * 16))


@triton.jit(do_not_specialize=["capacity"])
def _grouped(x, weight, scales, bias, shares, lists, counts, out, capacity, alpha, limit,
             SIZE: tl.constexpr, OUTPUTS: tl.constexpr, TOP: tl.constexpr, M: tl.constexpr,
             N: tl.constexpr, G: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
             ACTIVATION: tl.constexpr):  # fmt: skip
    """Like `experts._grouped`; gate and up are interleaved, so a tile has `N` of both
    together."""
    expert = tl.program_id(1)
    count = tl.load(counts + expert)
    if count == 0:
        return
    lines: tl.constexpr = OUTPUTS * 2 if GATED else OUTPUTS
    line = tl.program_id(0) * N + tl.arange(0, N)
    known = line < lines
    line = tl.where(known, line, 0)
    whole = weight + expert.to(tl.int64) * (lines * (SIZE // 2))
    all_scales = scales + expert.to(tl.int64) * (lines * (SIZE // 32))
    kind: tl.constexpr = x.dtype.element_ty
    j = tl.arange(0, G * 16)
    for first in range(0, count, M):
        member = first + tl.arange(0, M)
        there = member < count
        pair = tl.load(lists + expert * capacity + member, mask=there, other=0)
        source = pair
        if GATED:
            source = pair // TOP
        rows = x + source.to(tl.int64)[None, :] * SIZE
        acc = tl.zeros([N, M], tl.float32)
        for group in tl.range(0, SIZE // 32, G, num_stages=3):
            k = (group + j // 16) * 32 + j % 16
            mask = (k < SIZE)[:, None] & there[None, :]
            low = tl.load(rows + k[:, None], mask=mask, other=0.0)
            high = tl.load(rows + k[:, None] + 16, mask=mask, other=0.0)
            w_low, w_high = _tile(whole, all_scales, line, group, SIZE, G, kind)
            acc = tl.dot(w_low, low, acc)
            acc = tl.dot(w_high, high, acc)
        if BIASED:
            of_line = tl.load(bias + expert * lines + line, mask=known, other=0.0)
            acc += of_line.to(tl.float32)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (N // 2, 2, M)), (0, 2, 1)))
            acc = activate(gate, up, alpha, limit, ACTIVATION)
            output = tl.program_id(0) * (N // 2) + tl.arange(0, N // 2)
        else:
            share = tl.load(shares + pair, mask=there, other=0.0)
            acc = acc * share[None, :]
            output = tl.program_id(0) * N + tl.arange(0, N)
        target = out + pair.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
        tl.store(target, acc.to(kind), mask=(output < OUTPUTS)[:, None] & there[None, :])


def add_pairs(
    x: Tensor,
    hidden: Tensor,
    weights: ExpertWeights,
    ids: Tensor,
    shares: Tensor,
    norm: tuple[Tensor, float] | None = None,
) -> None:
    """See `experts.add_pairs`."""
    rows, size = x.shape
    top, inner = ids.shape[1], weights.inner
    narrow = torch.empty((rows * top, inner), dtype=x.dtype, device=x.device)
    norm_weight, epsilon = norm or (x, 0.0)
    early = starts_early(x)
    _pair_gate_up[(triton.cdiv(inner, 4), rows * top)](
        x, weights.gate_up, weights.gate_up_scales,
        x if weights.gate_up_bias is None else weights.gate_up_bias,
        norm_weight, ids, narrow, epsilon, weights.alpha, weights.limit,
        SIZE=size, OUTPUTS=inner, TOP=top, N=4, GROUPS=32, NORMED=norm is not None,
        BIASED=weights.gate_up_bias is not None, ACTIVATION=int(weights.activation),
        ASM=x.is_cuda, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    _pair_down[(triton.cdiv(size, 8), rows)](
        narrow, weights.down, weights.down_scales,
        x if weights.down_bias is None else weights.down_bias, ids, shares, hidden,
        SIZE=inner, OUTPUTS=size, TOP=top, N=8, GROUPS=32,
        BIASED=weights.down_bias is not None, ASM=x.is_cuda, EARLY=early, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip


def add_grouped(
    normed: Tensor, hidden: Tensor, weights: ExpertWeights, routing: Routing
) -> None:
    """See `experts.add_grouped`."""
    rows, size = normed.shape
    top, inner = routing.ids.shape[1], weights.inner
    narrow = normed.new_empty((rows * top, inner))
    wide = normed.new_empty((rows * top, size))
    tile = tile_rows(rows * top, len(weights.down))
    for x, packed, scales, bias, out, is_gated in (
        (normed, weights.gate_up, weights.gate_up_scales, weights.gate_up_bias, narrow, True),
        (narrow, weights.down, weights.down_scales, weights.down_bias, wide, False),
    ):
        lines = packed.shape[1]
        _grouped[(triton.cdiv(lines, 64), len(packed))](
            x, packed, scales, x if bias is None else bias, routing.weights, routing.lists,
            routing.counts, out, routing.lists.shape[1], weights.alpha, weights.limit,
            SIZE=x.shape[1], OUTPUTS=out.shape[1], TOP=top, M=tile, N=64, G=4, GATED=is_gated,
            BIASED=bias is not None, ACTIVATION=int(weights.activation),
            num_warps=8 if tile >= 64 else 4,
        )  # fmt: skip
    combine_pairs(wide, hidden, top)
