"""Products of one row with a quantised weight, which is read once at memory speed.

A program keeps its row in registers, in the form that the products need, and reads its lines of
the weight one after another: each thread has the same inputs of every line. So the row's norm
and its conversion are computed once per program, not once per line.

    e4m3    float16 products; the row is scaled so that sums stay within float16
    int4    integer products; the inputs of a thread are integers of 15 bits with a common exponent
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import GateActivation, activate
from headwater.device.kernels.early import lets_next_start, start_early, starts_early
from headwater.device.kernels.quantized import Code
from headwater.device.kernels.unpack import (
    e4m3_products,
    half_pair,
    int4_products,
)

_DEEP = 8192
"""With more inputs than this, a program has more warps."""

_MANY_LINES = 1 << 14
"""With fewer lines than this, a program computes one or two tiles of 4-bit codes."""

_TILE_BYTES = 1 << 17
"""Maximum number of bytes of a tile, so that it fits into shared memory."""


@triton.jit
def four_inputs(x, norm_weight, place, there, squares, NORMED: tl.constexpr):  # noqa: ANN201
    """Four neighbouring inputs from each `place` on, times the norm's weights; and sums of their
    squares."""
    at = place[:, None] + tl.arange(0, 4)[None, :]
    values = tl.load(x + at, mask=there[:, None], other=0.0).to(tl.float32)
    if NORMED:
        squares += tl.sum(values * values, 1)
        weights = tl.load(norm_weight + at, mask=there[:, None], other=0.0)
        values = values * weights.to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (place.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth, squares


@triton.jit
def largest_of_four(a, b, c, d):  # noqa: ANN201 - Triton's own types
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def exponent_bits(x):  # noqa: ANN201 - Triton's own types
    """The exponent of positive numbers with its bias, not below that of 1e-30."""
    return tl.maximum(x, 1e-30).to(tl.int32, bitcast=True) >> 23


@triton.jit
def with_exponent(bits):  # noqa: ANN201 - Triton's own types
    """2 ** (bits - 127)."""
    return (bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def _bytes(a, b, c, d):
    """The low bytes of four integers, as one integer."""
    return (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)


@triton.jit
def _fixed(a, b, c, d, scale):
    """Four inputs as integers: their high bytes, their low bytes, and their sum."""
    a = tl.floor(a * scale + 0.5).to(tl.int32)
    b = tl.floor(b * scale + 0.5).to(tl.int32)
    c = tl.floor(c * scale + 0.5).to(tl.int32)
    d = tl.floor(d * scale + 0.5).to(tl.int32)
    # Low bytes have a sign, so high bytes are rounded.
    high = _bytes((a + 128) >> 8, (b + 128) >> 8, (c + 128) >> 8, (d + 128) >> 8)
    return high[None, :], _bytes(a, b, c, d)[None, :], a + b + c + d


@triton.jit
def _stored(line, LINES: tl.constexpr, HALVES: tl.constexpr):
    """The row of the weight that is this line. With `HALVES`, gate has the first half of the rows
    and up the second; their lines alternate."""
    return line // 2 + line % 2 * (LINES // 2) if HALVES else line


@triton.jit
def _gemv(x, weight, scales, zeros, norm_weight, residual, out, epsilon, factor, line_stride,
          group_stride, SIZE: tl.constexpr, LINES: tl.constexpr, EACH: tl.constexpr,
          N: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, INT4: tl.constexpr,
          GROUPED: tl.constexpr, ZEROS: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr,
          ADDED: tl.constexpr, ACTIVATION: tl.constexpr, STAGES: tl.constexpr,
          HALVES: tl.constexpr, EARLY: tl.constexpr, NEXT: tl.constexpr):  # fmt: skip
    """Compute the products with `EACH` lines of the weight, `N` at a time. A line has at most
    `WIDTH` words of 64 bits."""
    start_early(EARLY, NEXT)
    codes: tl.constexpr = 16 if INT4 else 8
    words: tl.constexpr = SIZE // codes
    pairs: tl.constexpr = WIDTH // 2
    at = tl.arange(0, WIDTH)
    there = at < words
    squares = tl.zeros([WIDTH], tl.float32)
    if INT4:
        in_chunk: tl.constexpr = GROUP // codes
        quarter: tl.constexpr = GROUP // 4
        place = at // in_chunk * GROUP + at % in_chunk * 4
        a0, a1, a2, a3, squares = four_inputs(x, norm_weight, place, there, squares, NORMED)
        place += quarter
        b0, b1, b2, b3, squares = four_inputs(x, norm_weight, place, there, squares, NORMED)
        place += quarter
        c0, c1, c2, c3, squares = four_inputs(x, norm_weight, place, there, squares, NORMED)
        place += quarter
        d0, d1, d2, d3, squares = four_inputs(x, norm_weight, place, there, squares, NORMED)
        top = tl.maximum(
            tl.maximum(largest_of_four(a0, a1, a2, a3), largest_of_four(b0, b1, b2, b3)),
            tl.maximum(largest_of_four(c0, c1, c2, c3), largest_of_four(d0, d1, d2, d3)),
        )
        # Two words are 32 inputs, which share a scale of the weight; they also share an
        # exponent. The largest becomes 2 ** 13 to 2 ** 14.
        own = exponent_bits(tl.max(tl.reshape(top, (pairs, 2)), 1)) - 13
        down = with_exponent(own)[None, :]
        both = tl.reshape(tl.broadcast_to(own[:, None], (pairs, 2)), (WIDTH,))
        up = with_exponent(254 - both)
        # A byte has codes of quarters 0 and 1, or of 2 and 3.
        xa, xb, sum0 = _fixed(a0, c0, a1, c1, up)
        xc, xd, sum1 = _fixed(b0, d0, b1, d1, up)
        xe, xf, sum2 = _fixed(a2, c2, a3, c3, up)
        xg, xh, sum3 = _fixed(b2, d2, b3, d3, up)
        sums = sum0 + sum1 + sum2 + sum3
        initial = (-8 * sums)[None, :]
        sums = tl.sum(tl.reshape(sums, (pairs, 2)), 1).to(tl.float32)[None, :]
        row_scale = 1.0
    else:
        a0, a1, a2, a3, squares = four_inputs(x, norm_weight, at * 8, there, squares, NORMED)
        b0, b1, b2, b3, squares = four_inputs(
            x, norm_weight, at * 8 + 4, there, squares, NORMED
        )
        top = tl.maximum(largest_of_four(a0, a1, a2, a3), largest_of_four(b0, b1, b2, b3))
        # The largest becomes 16 to 32: four products with 448 stay within float16.
        own = exponent_bits(tl.max(top, 0)) - 4
        up = with_exponent(254 - own)
        xa = half_pair(a0 * up, a1 * up)[None, :]
        xb = half_pair(a2 * up, a3 * up)[None, :]
        xc = half_pair(b0 * up, b1 * up)[None, :]
        xd = half_pair(b2 * up, b3 * up)[None, :]
        row_scale = with_exponent(own)
    if NORMED:
        row_scale = row_scale * tl.rsqrt(tl.sum(squares, 0) / SIZE + epsilon)
    begin = tl.program_id(0) * EACH
    end = tl.minimum(begin + EACH, LINES)
    of_tile = tl.arange(0, N)
    pair = tl.arange(0, pairs)
    known_pair = (pair < words // 2)[None, :]
    scale_at = (pair * (2 * codes) // GROUP * group_stride)[None, :]
    line = begin + of_tile
    if GROUPED:
        scale = tl.load(
            scales + _stored(line, LINES, HALVES)[:, None] * line_stride + scale_at,
            mask=(line < end)[:, None] & known_pair,
            other=0,
        )
    for first in tl.range(begin, end, N, num_stages=STAGES):
        line = first + of_tile
        known = line < end
        w = tl.load(
            weight + _stored(line, LINES, HALVES).to(tl.int64)[:, None] * words + at[None, :],
            mask=known[:, None] & there[None, :],
            other=0,
        )
        if GROUPED:
            # Scales are read one iteration ahead: loads of two bytes are not pipelined.
            used = scale.to(tl.float32)
            after = line + N
            scale = tl.load(
                scales + _stored(after, LINES, HALVES)[:, None] * line_stride + scale_at,
                mask=(after < end)[:, None] & known_pair,
                other=0,
            )
        if INT4:
            products = int4_products(w, initial, xa, xb, xc, xd, xe, xf, xg, xh)
            part = tl.sum(tl.reshape(products, (N, pairs, 2)), 2).to(tl.float32)
            if ZEROS:
                zero = tl.load(
                    zeros + _stored(line, LINES, HALVES)[:, None] * line_stride + scale_at,
                    mask=known[:, None] & known_pair,
                    other=8,
                )
                part -= (zero.to(tl.float32) - 8.0) * sums
            part = part * down
        else:
            products = e4m3_products(w, xa, xb, xc, xd)
            part = tl.sum(tl.reshape(products, (N, pairs, 2)), 2)
        if GROUPED:
            part = part * used
        total = tl.sum(part, 1) * row_scale
        if not GROUPED:
            places = scales + _stored(line, LINES, HALVES)
            total = total * tl.load(places, mask=known, other=0.0)
        output = line
        if GATED:
            gate, up_part = tl.split(tl.reshape(total, (N // 2, 2)))
            total = activate(gate, up_part, 0.0, 0.0, ACTIVATION)
            output = first // 2 + tl.arange(0, N // 2)
            known = output < end // 2
        if ADDED:
            before = tl.load(residual + output, mask=known, other=0.0)
            total = total * factor + before.to(tl.float32)
        tl.store(out + output, total, mask=known)


def gemv(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    code: Code,
    group: int,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    in_halves: bool = False,
    residual: Tensor | None = None,
    factor: float = 1.0,
    activation: GateActivation = GateActivation.SILU,
) -> Tensor:
    """Like `gemv.gemv`, for one row; `group` is the number of inputs that share a scale, or the
    chunk size. With `in_halves` a gated weight has all rows of gate, then all of up."""
    size, lines = x.shape[1], len(weight)
    out = residual
    if out is None:
        outputs = lines // 2 if gated else lines
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    norm_weight, epsilon = norm or (x, 0.0)
    is_int4 = code is Code.INT4
    words = weight.view(torch.int64)
    n, programs, stages, warps = _shape(size, words.shape[1], lines, is_int4=is_int4)
    each = triton.cdiv(triton.cdiv(lines, programs), n) * n
    early = starts_early(x)
    _gemv[(triton.cdiv(lines, each),)](
        x, words, scales, scales if zeros is None else zeros, norm_weight,
        x if residual is None else residual, out, epsilon, factor, scales.stride(0),
        scales.stride(-1), SIZE=size, LINES=lines, EACH=each, N=n,
        WIDTH=triton.next_power_of_2(words.shape[1]), GROUP=group, INT4=is_int4,
        GROUPED=scales.dim() == 2, ZEROS=zeros is not None, NORMED=norm is not None, GATED=gated,
        ADDED=residual is not None, ACTIVATION=int(activation), STAGES=stages,
        HALVES=gated and in_halves, EARLY=early, NEXT=lets_next_start(x), num_warps=warps,
        launch_pdl=early,
    )  # fmt: skip
    return out


def _shape(size: int, words: int, lines: int, *, is_int4: bool) -> tuple[int, int, int, int]:
    """Lines at a time, programs, iterations read ahead, and warps; the fastest of about 15 on an
    H200."""
    if size > _DEEP:
        fitting = _TILE_BYTES // (8 * triton.next_power_of_2(words))
        return min(8 if is_int4 else 4, fitting), 264, 2, 8 if size <= 2 * _DEEP else 16
    if is_int4 and lines < _MANY_LINES:
        return 8, 1056, 3, 4
    return 4, 528, 3, 4
