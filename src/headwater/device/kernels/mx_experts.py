"""GEMMs of tokens with experts whose weights stay packed in MXFP4; the counterpart of
`expert_pairs` and `expert_groups`.

Weights are `[experts, outputs, inputs / 2]` bytes in the order of `unpack`, with an exponent for each
32 inputs of an output, which are a chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import activate
from headwater.device.kernels.early import (
    MAX_EARLY_EXPERT_ROWS,
    start_early,
    starts_early,
)
from headwater.device.kernels.expert_groups import combine_pairs, row_programs, tile_rows
from headwater.device.kernels.experts import ExpertWeights
from headwater.device.kernels.mx_prompts import MIN_ROWS, add_prompt
from headwater.device.kernels.quantized_gemv import (
    exponent_bits,
    largest_of_four,
    with_exponent,
)
from headwater.device.kernels.routing import Routing
from headwater.device.kernels.unpack import e2m1_numbers, e2m1_products, half_pair

_LINES = 8
"""Lines of a weight that a program of a pair computes at a time."""

_PROGRAMS = 132
"""Programs of a pair: one per processor of an H200."""

_SHAPES = {16: (64, 3, 4), 32: (128, 4, 8), 64: (128, 3, 8), 128: (128, 3, 8)}
"""Tile shapes by the rows of a tile: lines, iterations read ahead, and warps; the fastest of 8 on
an H200."""

_GROUPS = 4
"""Groups of inputs of an iteration."""


@triton.jit
def _four(x, at, there, number: tl.constexpr):
    """The four 16-bit numbers of nibble `number` of each 64-bit word of a line, as float32.
    They are read as one: the same thread needs all of them."""
    # Two words belong to each 32 inputs, in this shape so that a thread reads 16 bytes.
    groups: tl.constexpr = at.shape[0] // 2
    kind: tl.constexpr = x.dtype.element_ty
    pair = tl.arange(0, groups)[:, None] * 8 + number * 2 + tl.arange(0, 2)[None, :]
    numbers = tl.load(
        x.to(tl.pointer_type(tl.int64)) + pair, mask=tl.reshape(there, (groups, 2)), other=0
    )
    numbers = tl.reshape(numbers, (at.shape[0],))
    return (
        numbers.to(tl.int16).to(kind, bitcast=True).to(tl.float32),
        (numbers >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32),
        (numbers >> 32).to(tl.int16).to(kind, bitcast=True).to(tl.float32),
        (numbers >> 48).to(tl.int16).to(kind, bitcast=True).to(tl.float32),
    )


@triton.jit
def _four_inputs(x, norm_weight, at, there, squares, number: tl.constexpr,
                 NORMED: tl.constexpr):  # fmt: skip
    """`_four` of a row, multiplied by the weights of its norm, and sums of squares."""
    a, b, c, d = _four(x, at, there, number)
    if NORMED:
        squares += a * a + b * b + c * c + d * d
        wa, wb, wc, wd = _four(norm_weight, at, there, number)
        a, b, c, d = a * wa, b * wb, c * wc, d * wd
    return a, b, c, d, squares


@triton.jit
def _input_pairs(x, norm_weight, at, there, NORMED: tl.constexpr):
    """The inputs of each 64-bit word of a line as pairs of float16, the factor of each word for
    products with them, and sums of squares."""
    squares = tl.zeros([at.shape[0]], tl.float32)
    a0, a1, a2, a3, squares = _four_inputs(x, norm_weight, at, there, squares, 0, NORMED)
    b0, b1, b2, b3, squares = _four_inputs(x, norm_weight, at, there, squares, 1, NORMED)
    c0, c1, c2, c3, squares = _four_inputs(x, norm_weight, at, there, squares, 2, NORMED)
    d0, d1, d2, d3, squares = _four_inputs(x, norm_weight, at, there, squares, 3, NORMED)
    top = tl.maximum(
        tl.maximum(largest_of_four(a0, a1, a2, a3), largest_of_four(b0, b1, b2, b3)),
        tl.maximum(largest_of_four(c0, c1, c2, c3), largest_of_four(d0, d1, d2, d3)),
    )
    # The largest of a word becomes 2 ** 14 to 2 ** 15, because codes become float16 numbers that
    # are 2 ** 14 too small. So products that matter are not below the range of float16. A factor
    # for each word, unlike one for the row, needs no exchange between threads.
    own = exponent_bits(top)
    up = with_exponent(268 - own)
    return (
        half_pair(a0 * up, a1 * up)[None, :],
        half_pair(a2 * up, a3 * up)[None, :],
        half_pair(b0 * up, b1 * up)[None, :],
        half_pair(b2 * up, b3 * up)[None, :],
        half_pair(c0 * up, c1 * up)[None, :],
        half_pair(c2 * up, c3 * up)[None, :],
        half_pair(d0 * up, d1 * up)[None, :],
        half_pair(d2 * up, d3 * up)[None, :],
        with_exponent(own),
        squares,
    )


@triton.jit
def _line_parts(w, exponents, factors, a, b, c, d, e, f, g, h, N: tl.constexpr,
                GROUPS: tl.constexpr):  # fmt: skip
    """For `N` lines: the sum of products of each group of inputs, multiplied by the `factors` of
    words and the group's scale."""
    products = e2m1_products(w, a, b, c, d, e, f, g, h) * factors[None, :]
    return tl.sum(tl.reshape(products, (N, GROUPS, 2)), 2) * with_exponent(
        exponents.to(tl.int32)
    )


@triton.jit
def _pair_gate_up(x, weight, scales, bias, norm_weight, ids, out, epsilon, alpha, limit,
                  SIZE: tl.constexpr, OUTPUTS: tl.constexpr, TOP: tl.constexpr,
                  EACH: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
                  NORMED: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr,
                  STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Compute `EACH` lines of gate and up for one pair, `N` at a time, as in
    `quantized_gemv`."""
    start_early(EARLY)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    lines: tl.constexpr = 2 * OUTPUTS
    words: tl.constexpr = SIZE // 16
    groups: tl.constexpr = SIZE // 32
    at = tl.arange(0, WIDTH)
    there = at < words
    xa, xb, xc, xd, xe, xf, xg, xh, factors, squares = _input_pairs(
        x + (pair // TOP) * SIZE, norm_weight, at, there, NORMED
    )
    row_scale = 1.0
    if NORMED:
        row_scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + epsilon)
    begin = tl.program_id(0) * EACH
    end = tl.minimum(begin + EACH, lines)
    whole = weight + expert * (lines * words) + at[None, :]
    group = tl.arange(0, WIDTH // 2)[None, :]
    known_group = group < groups
    all_scales = scales + expert * (lines * groups) + group
    line = begin + tl.arange(0, N)
    exponents = tl.load(
        all_scales + line[:, None] * groups, mask=(line < end)[:, None] & known_group, other=0
    )
    for first in tl.range(begin, end, N, num_stages=STAGES):
        line = first + tl.arange(0, N)
        known = line < end
        w = tl.load(
            whole + line[:, None] * words, mask=known[:, None] & there[None, :], other=0
        )
        # Scales are read one iteration ahead: loads of single bytes are not pipelined.
        used = exponents
        after = line + N
        exponents = tl.load(
            all_scales + after[:, None] * groups,
            mask=(after < end)[:, None] & known_group,
            other=0,
        )
        part = _line_parts(w, used, factors, xa, xb, xc, xd, xe, xf, xg, xh, N, WIDTH // 2)
        total = tl.sum(part, 1) * row_scale
        if BIASED:
            of_line = tl.load(bias + expert * lines + line, mask=known, other=0.0)
            total += of_line.to(tl.float32)
        gate, up = tl.split(tl.reshape(total, (N // 2, 2)))
        output = first // 2 + tl.arange(0, N // 2)
        result = activate(gate, up, alpha, limit, ACTIVATION)
        tl.store(out + pair * OUTPUTS + output, result, mask=output < end // 2)


@triton.jit
def _some_lines(weight, scales, line, known, at, there, WIDTH: tl.constexpr,
                WORDS: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    """Words and exponents of some lines."""
    w = tl.load(
        weight + line[:, None] * WORDS + at[None, :], mask=known[:, None] & there[None, :],
        other=0,
    )  # fmt: skip
    group = tl.arange(0, WIDTH // 2)[None, :]
    exponents = tl.load(
        scales + line[:, None] * GROUPS + group, mask=known[:, None] & (group < GROUPS), other=0
    )
    return w, exponents


@triton.jit
def _pair_down(x, weight, scales, bias, ids, shares, hidden, SIZE: tl.constexpr,
               OUTPUTS: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
               BIASED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """All experts of one row, added to the residual."""
    start_early(EARLY)
    row = tl.program_id(1)
    words: tl.constexpr = SIZE // 16
    groups: tl.constexpr = SIZE // 32
    at = tl.arange(0, WIDTH)
    there = at < words
    line = tl.program_id(0) * N + tl.arange(0, N)
    known = line < OUTPUTS
    acc = tl.zeros([N, WIDTH // 2], tl.float32)
    biases = tl.zeros([N], tl.float32)
    expert = tl.load(ids + row * TOP).to(tl.int64)
    w, exponents = _some_lines(
        weight, scales, expert * OUTPUTS + line, known, at, there, WIDTH, words, groups
    )
    for number in tl.static_range(TOP):
        pair = row * TOP + number
        share = tl.load(shares + pair)
        if number + 1 < TOP:  # the next weights come during the products with these
            after = tl.load(ids + pair + 1).to(tl.int64)
            next_w, next_exponents = _some_lines(
                weight, scales, after * OUTPUTS + line, known, at, there, WIDTH, words, groups
            )
        xa, xb, xc, xd, xe, xf, xg, xh, factors, _ = _input_pairs(
            x + pair * SIZE, x, at, there, False
        )
        part = _line_parts(w, exponents, factors, xa, xb, xc, xd, xe, xf, xg, xh, N, WIDTH // 2)
        acc += part * share
        if BIASED:
            of_line = tl.load(bias + expert * OUTPUTS + line, mask=known, other=0.0)
            biases += share * of_line.to(tl.float32)
        if number + 1 < TOP:
            expert, w, exponents = after, next_w, next_exponents
    place = hidden + row * OUTPUTS + line
    result = tl.load(place, mask=known, other=0.0).to(tl.float32) + tl.sum(acc, 1) + biases
    tl.store(place, result, mask=known)


@triton.jit(do_not_specialize=["capacity"])
def _grouped(x, weight, scales, bias, shares, lists, counts, out, capacity, alpha, limit,
             SIZE: tl.constexpr, OUTPUTS: tl.constexpr, TOP: tl.constexpr, M: tl.constexpr,
             N: tl.constexpr, G: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
             ACTIVATION: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Like `expert_groups._grouped`; gate and up are interleaved, so a tile has `N` of both
    together. `G` groups of inputs per iteration."""
    start_early(EARLY)
    expert = tl.program_id(2)
    count = tl.load(counts + expert)
    begin = tl.program_id(1) * M
    if begin >= count:
        return
    lines: tl.constexpr = OUTPUTS * 2 if GATED else OUTPUTS
    groups: tl.constexpr = SIZE // 32
    numbers: tl.constexpr = SIZE // 4
    line = tl.program_id(0) * N + tl.arange(0, N)
    known = line < lines
    line = tl.where(known, line, 0)
    whole = weight + expert.to(tl.int64) * (lines * numbers) + line[:, None] * numbers
    all_scales = scales + expert.to(tl.int64) * (lines * groups) + line[:, None] * groups
    kind: tl.constexpr = x.dtype.element_ty
    of_group = tl.arange(0, G)[None, :]
    j = tl.arange(0, G * 8)
    for first in range(begin, count, M * tl.num_programs(1)):
        member = first + tl.arange(0, M)
        there = member < count
        pair = tl.load(lists + expert * capacity + member, mask=there, other=0)
        source = pair
        if GATED:
            source = pair // TOP
        rows = x + source.to(tl.int64)[None, :] * SIZE
        acc = tl.zeros([N, M], tl.float32)
        exponents = tl.load(all_scales + of_group, mask=of_group < groups, other=0)
        for group in tl.range(0, groups, G, num_stages=STAGES):
            k = (group + j // 8) * 32 + j % 8
            inside = k < SIZE
            mask = inside[:, None] & there[None, :]
            w = tl.load(whole + (group * 8 + j)[None, :], mask=inside[None, :], other=0)
            x0 = tl.load(rows + k[:, None], mask=mask, other=0.0)
            x1 = tl.load(rows + k[:, None] + 8, mask=mask, other=0.0)
            x2 = tl.load(rows + k[:, None] + 16, mask=mask, other=0.0)
            x3 = tl.load(rows + k[:, None] + 24, mask=mask, other=0.0)
            used = exponents
            after = group + G + of_group
            exponents = tl.load(all_scales + after, mask=after < groups, other=0)
            scale = _number_scales(used, kind)
            scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (N, G, 8)), (N, G * 8))
            w0, w1, w2, w3 = e2m1_numbers(w, scale)
            acc = tl.dot(w0, x0, acc)
            acc = tl.dot(w1, x1, acc)
            acc = tl.dot(w2, x2, acc)
            acc = tl.dot(w3, x3, acc)
        acc = acc * (18446744073709551616.0 if kind == tl.bfloat16 else 8.0)
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


@triton.jit
def _number_scales(exponents, KIND: tl.constexpr):
    """The factors with which `e2m1_numbers` returns weights divided by 2 ** 64 (bfloat16) or
    by 2 ** 3 (float16). The caller multiplies the sums by that number. Without the division,
    scales of real models would exceed the range of the type."""
    if tl.bfloat16 == KIND:
        bits = (exponents.to(tl.int16) + 62) << 7
    else:
        bits = tl.minimum(tl.maximum(exponents.to(tl.int16) - 101, 0), 30) << 10
    return bits.to(tl.int16).to(KIND, bitcast=True)


def add_pairs(
    x: Tensor,
    hidden: Tensor,
    weights: ExpertWeights,
    ids: Tensor,
    shares: Tensor,
    norm: tuple[Tensor, float] | None = None,
) -> None:
    """See `expert_pairs.add_pairs`."""
    rows, size = x.shape
    top, inner = ids.shape[1], weights.inner
    narrow = torch.empty((rows * top, inner), dtype=x.dtype, device=x.device)
    norm_weight, epsilon = norm or (x, 0.0)
    early = starts_early(x)
    lines = 2 * inner
    each = triton.cdiv(triton.cdiv(lines, _PROGRAMS), _LINES) * _LINES
    _pair_gate_up[(triton.cdiv(lines, each), rows * top)](
        x, weights.gate_up.view(torch.int64), weights.gate_up_scales,
        x if weights.gate_up_bias is None else weights.gate_up_bias,
        norm_weight, ids, narrow, epsilon, weights.alpha, weights.limit,
        SIZE=size, OUTPUTS=inner, TOP=top, EACH=each, N=_LINES,
        WIDTH=triton.next_power_of_2(size // 16), NORMED=norm is not None,
        BIASED=weights.gate_up_bias is not None, ACTIVATION=int(weights.activation), STAGES=3,
        EARLY=early, num_warps=8 if rows == 1 else 4, launch_pdl=early,
    )  # fmt: skip
    _pair_down[(triton.cdiv(size, _LINES), rows)](
        narrow, weights.down.view(torch.int64), weights.down_scales,
        x if weights.down_bias is None else weights.down_bias, ids, shares, hidden,
        SIZE=inner, OUTPUTS=size, TOP=top, N=_LINES, WIDTH=triton.next_power_of_2(inner // 16),
        BIASED=weights.down_bias is not None, EARLY=early, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip


def add_grouped(
    normed: Tensor, hidden: Tensor, weights: ExpertWeights, routing: Routing
) -> None:
    """See `expert_groups.add_grouped`."""
    rows, size = normed.shape
    top, inner = routing.ids.shape[1], weights.inner
    if rows * top >= MIN_ROWS * len(weights.down) or normed.element_size() == 4:
        add_prompt(normed, hidden, weights, routing)
        return
    narrow = normed.new_empty((rows * top, inner))
    wide = normed.new_empty((rows * top, size))
    tile = tile_rows(rows * top, len(weights.down))
    across, stages, warps = _SHAPES[tile]
    early = starts_early(normed, most=MAX_EARLY_EXPERT_ROWS)
    for x, packed, scales, bias, out, is_gated in (
        (normed, weights.gate_up, weights.gate_up_scales, weights.gate_up_bias, narrow, True),
        (narrow, weights.down, weights.down_scales, weights.down_bias, wide, False),
    ):
        lines = packed.shape[1]
        shared = row_programs(rows * top, len(packed), tile)
        _grouped[(triton.cdiv(lines, across), shared, len(packed))](
            x, packed.view(torch.int16), scales, x if bias is None else bias, routing.weights, routing.lists,
            routing.counts, out, routing.lists.shape[1], weights.alpha, weights.limit,
            SIZE=x.shape[1], OUTPUTS=out.shape[1], TOP=top, M=tile, N=across, G=_GROUPS, GATED=is_gated,
            BIASED=bias is not None, ACTIVATION=int(weights.activation), STAGES=stages,
            EARLY=early, num_warps=warps, launch_pdl=early,
        )  # fmt: skip
    combine_pairs(wide, hidden, top)
