"""Products with quantised weights, `[outputs, inputs]` like all weights.

    FP8 by row      e4m3 numbers, a scale for each output
    FP8 by group    e4m3 numbers, a scale for each output and group of inputs
    INT4 by group   two codes in a byte: low bits are the first half of a chunk of inputs, high bits the second
    MXFP4           e2m1 numbers in that order, a power of two for each output and 32 inputs

With one row, the time is that of reading weights: `gemv` converts them inside the product, like
its namesake for plain weights. Few rows use the tensor cores (`small_gemm`). For many rows the
weights are dequantised into memory first, or torch's FP8 products are used.
"""

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import GateActivation, activate
from headwater.device.kernels.early import REQUEST_UNIT, request, start_early, starts_early


class Code(IntEnum):
    """How elements are stored."""

    FP8_ROW = 0
    FP8_GROUP = 1
    INT4 = 2
    MXFP4 = 3


MAX_SMALL_ROWS = 32
"""Largest batch of `small_gemm`."""


@triton.jit
def _quantize_rows(x, weight, codes, scales, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                   NORMED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    values = tl.load(x + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
        values = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(values), 0), 1e-10)
    tl.store(scales + row, top / 448.0)
    tl.store(codes + row * SIZE + at, (values * (448.0 / top)).to(tl.float8e4nv), mask=inside)


def quantize_rows(x: Tensor, norm: tuple[Tensor, float] | None = None) -> tuple[Tensor, Tensor]:
    """e4m3 elements of the rows of `x`, normalised first if `norm` is given, and a scale for
    each row."""
    rows, size = x.shape
    codes = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    weight, epsilon = norm or (x, 0.0)
    block = triton.next_power_of_2(size)
    early = starts_early(x)
    _quantize_rows[(rows,)](
        x, weight, codes, scales, epsilon, SIZE=size, BLOCK=block, NORMED=norm is not None,
        EARLY=early, num_warps=8 if block > 4096 else 4, launch_pdl=early,
    )  # fmt: skip
    return codes, scales


@triton.jit
def e2m1_numbers(code):  # noqa: ANN201 - Triton's own types
    """Values of 4-bit codes `s e e m`, as float32."""
    # The three low bits are exponent and fraction of a float32 that is 2 ** 126 too small.
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _int4_products(codes, low, high):
    """`(low code - 8) * low + (high code - 8) * high` of bytes, in float16, two at a time.

    A code in the low bits of 0x6400 is the float16 number 1024 + code.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, l0, l1, h0, h1, magic, bias;
        mov.b32 magic, 0x64646464;
        mov.b32 bias, 0x64086408;
        and.b32 a, $2, 0x0F0F0F0F;
        shr.u32 b, $2, 4;
        and.b32 b, b, 0x0F0F0F0F;
        prmt.b32 l0, a, magic, 0x4140;
        prmt.b32 l1, a, magic, 0x4342;
        prmt.b32 h0, b, magic, 0x4140;
        prmt.b32 h1, b, magic, 0x4342;
        sub.rn.f16x2 l0, l0, bias;
        sub.rn.f16x2 l1, l1, bias;
        sub.rn.f16x2 h0, h0, bias;
        sub.rn.f16x2 h1, h1, bias;
        mul.rn.f16x2 l0, l0, $3;
        mul.rn.f16x2 l1, l1, $4;
        fma.rn.f16x2 $0, h0, $5, l0;
        fma.rn.f16x2 $1, h1, $6, l1;
        }
        """,
        "=r,=r,r,r,r,r,r",
        [codes, low, high],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _e2m1_products(codes, low, high):
    """`low value * low + high value * high` of e2m1 codes, two at a time. The bits of a code,
    shifted into a float16, are a value that is 2 ** 14 too small, so it is multiplied by that
    first."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s, l0, l1, h0, h1;
        and.b32 a, $2, 0x07070707;
        and.b32 s, $2, 0x08080808;
        shl.b32 a, a, 1;
        shl.b32 s, s, 4;
        or.b32 a, a, s;
        and.b32 b, $2, 0x70707070;
        and.b32 s, $2, 0x80808080;
        shr.u32 b, b, 3;
        or.b32 b, b, s;
        prmt.b32 l0, a, 0, 0x1404;
        prmt.b32 l1, a, 0, 0x3424;
        prmt.b32 h0, b, 0, 0x1404;
        prmt.b32 h1, b, 0, 0x3424;
        mov.b32 s, 0x74007400;
        mul.rn.f16x2 l0, l0, s;
        mul.rn.f16x2 l1, l1, s;
        mul.rn.f16x2 h0, h0, s;
        mul.rn.f16x2 h1, h1, s;
        mul.rn.f16x2 l0, l0, $3;
        mul.rn.f16x2 l1, l1, $4;
        fma.rn.f16x2 $0, h0, $5, l0;
        fma.rn.f16x2 $1, h1, $6, l1;
        }
        """,
        "=r,=r,r,r,r,r,r",
        [codes, low, high],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _gemv(x, weight, scales, zeros, norm_weight, residual, out, epsilon, factor,
          SIZE: tl.constexpr, OUTPUTS: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
          GROUP: tl.constexpr, CODE: tl.constexpr, ZEROS: tl.constexpr, NORMED: tl.constexpr,
          GATED: tl.constexpr, ADDED: tl.constexpr, ACTIVATION: tl.constexpr,
          STAGES: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
          REQUESTED: tl.constexpr):  # fmt: skip
    """`N` outputs; an iteration reads `GROUPS` groups of `GROUP` inputs."""
    if REQUESTED > 0:
        lines: tl.constexpr = 2 * N if GATED else N
        width: tl.constexpr = SIZE // 2 if CODE >= 2 else SIZE
        slab = weight + tl.program_id(0).to(tl.int64) * (lines * width)
        request(slab, REQUESTED, EARLY, 4)
    start_early(EARLY)
    output = tl.program_id(0) * N + tl.arange(0, N)
    known = output < OUTPUTS
    output = tl.where(known, output, 0)
    line = output
    if GATED:
        line = output * 2
    half: tl.constexpr = GROUP // 2 if CODE >= 2 else GROUP
    left = tl.zeros([N, GROUPS, half], tl.float32)
    right = tl.zeros([N, GROUPS, half], tl.float32)
    squares = tl.zeros([GROUPS, half], tl.float32)
    of_turn = tl.arange(0, GROUPS)
    in_group = tl.arange(0, half)
    for first in tl.range(0, SIZE // GROUP, GROUPS, num_stages=STAGES):
        group = first + of_turn
        there = group < SIZE // GROUP
        at = group[:, None] * GROUP + in_group[None, :]
        mask = there[:, None] & (in_group < half)[None, :]
        low = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        high = low
        if CODE >= 2:
            high = tl.load(x + at + half, mask=mask, other=0.0).to(tl.float32)
        if NORMED:
            squares += low * low
            low = low * tl.load(norm_weight + at, mask=mask, other=0.0).to(tl.float32)
            if CODE >= 2:
                squares += high * high
                high = high * tl.load(norm_weight + at + half, mask=mask, other=0.0).to(
                    tl.float32
                )
        left = multiply_groups(left, weight, scales, zeros, line, group, in_group, there, low, high, SIZE,
                     GROUP, half, CODE, ZEROS, ASM)  # fmt: skip
        if GATED:
            right = multiply_groups(right, weight, scales, zeros, line + 1, group, in_group, there, low,
                          high, SIZE, GROUP, half, CODE, ZEROS, ASM)  # fmt: skip
    result = tl.sum(tl.sum(left, 2), 1)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / SIZE + epsilon)
        result = result * scale
    if CODE == 0:
        result = result * tl.load(scales + line)
    if GATED:
        other = tl.sum(tl.sum(right, 2), 1) * scale
        if CODE == 0:
            other = other * tl.load(scales + line + 1)
        result = activate(result, other, 0.0, 0.0, ACTIVATION)
    if ADDED:
        result = result * factor + tl.load(residual + output, mask=known, other=0.0).to(
            tl.float32
        )
    tl.store(out + output, result, mask=known)


@triton.jit
def multiply_groups(  # noqa: ANN201 - Triton's own types
    acc,
    weight,
    scales,
    zeros,
    line,
    group,
    in_group,
    there,
    low,
    high,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    half: tl.constexpr,
    CODE: tl.constexpr,
    ZEROS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the products of some groups of inputs to `[outputs, groups, inputs]`."""
    width: tl.constexpr = SIZE // 2 if CODE >= 2 else SIZE
    place = line.to(tl.int64)[:, None, None] * width
    place += (group * half)[None, :, None] + in_group[None, None, :]
    if CODE < 2:
        w = tl.load(weight + place, mask=there[None, :, None], other=0.0)
    else:
        w = tl.load(weight + place, mask=there[None, :, None], other=0)
    if CODE < 2:
        part = w.to(tl.float32) * low[None, :, :]
    elif ASM:
        # A sixteenth of the inputs, so that products with codes stay within the range of
        # float16.
        low16, w = tl.broadcast((low * 0.0625).to(tl.float16)[None, :, :], w)
        high16, w = tl.broadcast((high * 0.0625).to(tl.float16)[None, :, :], w)
        if CODE == 2:
            part = _int4_products(w, low16, high16).to(tl.float32)
            if ZEROS:
                at = line[:, None] * (SIZE // GROUP) + group[None, :]
                zero = tl.load(zeros + at, mask=there[None, :], other=8).to(tl.float32) - 8.0
                part -= zero[:, :, None] * ((low + high) * 0.0625)[None, :, :]
        else:
            part = _e2m1_products(w, low16, high16).to(tl.float32)
    elif CODE == 2:
        code = w.to(tl.int32)
        first = (code & 15).to(tl.float32)
        second = (code >> 4).to(tl.float32)
        at = line[:, None] * (SIZE // GROUP) + group[None, :]
        zero = tl.full([1, 1], 8, tl.float32)
        if ZEROS:
            zero = tl.load(zeros + at, mask=there[None, :], other=8).to(tl.float32)
        part = (first - zero[:, :, None]) * low[None, :, :]
        part += (second - zero[:, :, None]) * high[None, :, :]
    else:
        code = w.to(tl.int32)
        part = (
            e2m1_numbers(code & 15) * low[None, :, :]
            + e2m1_numbers(code >> 4) * high[None, :, :]
        )
    if CODE > 0:
        at = line[:, None] * (SIZE // GROUP) + group[None, :]
        scale = tl.load(scales + at, mask=there[None, :], other=0)
        if CODE == 3:
            scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        scale = scale.to(tl.float32)
        if ASM and CODE >= 2:
            scale = scale * 16.0
        part = part * scale[:, :, None]
    return acc + part


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
    residual: Tensor | None = None,
    factor: float = 1.0,
    activation: GateActivation = GateActivation.SILU,
) -> Tensor:
    """Like `gemv.gemv`, for one row; `group` is the number of inputs that share a scale, or the
    chunk size."""
    size = x.shape[1]
    outputs = len(weight) // 2 if gated else len(weight)
    out = residual
    if out is None:
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    norm_weight, epsilon = norm or (x, 0.0)
    is_last = residual is not None
    n, groups, stages = _gemv_shape(code, size, group, is_gated=gated, is_last=is_last)
    early = starts_early(x)
    slab = (2 * n if gated else n) * weight.stride(0) * weight.element_size()
    _gemv[(triton.cdiv(outputs, n),)](
        x, weight, scales, scales if zeros is None else zeros, norm_weight,
        x if residual is None else residual, out, epsilon, factor,
        SIZE=size, OUTPUTS=outputs, N=n, GROUPS=groups, GROUP=group, CODE=int(code),
        ZEROS=zeros is not None, NORMED=norm is not None, GATED=gated,
        ADDED=residual is not None, ACTIVATION=int(activation), STAGES=stages,
        ASM=x.is_cuda, EARLY=early, REQUESTED=slab if outputs % n == 0 and slab % REQUEST_UNIT == 0 else 0,
        num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out


def _gemv_shape(
    code: Code, size: int, group: int, *, is_gated: bool, is_last: bool
) -> tuple[int, int, int]:
    """Outputs of a tile, groups per iteration, and iterations read ahead; the fastest of 8 on
    an H200."""
    groups = 1
    while groups * group < min(1024, size):
        groups *= 2
    if is_last and code is not Code.MXFP4:
        return 8, groups, 3
    return (2 if is_gated and code is Code.MXFP4 else 4), groups, 1


@triton.jit(do_not_specialize=["rows"])
def _small_gemm(x, weight, scales, zeros, out, rows, OUTPUTS: tl.constexpr, SIZE: tl.constexpr,
                ROWS: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr,
                ZEROS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """A tile of outputs for all rows, a group of inputs at a time: `[outputs, rows]`."""
    output = tl.program_id(0) * N + tl.arange(0, N)
    known = output < OUTPUTS
    line = tl.where(known, output, 0)
    row = tl.arange(0, ROWS)
    half: tl.constexpr = GROUP // 2 if CODE >= 2 else GROUP
    width: tl.constexpr = SIZE // 2 if CODE >= 2 else SIZE
    kind: tl.constexpr = x.dtype.element_ty
    in_group = tl.arange(0, half)
    acc = tl.zeros([N, ROWS], tl.float32)
    for group in tl.range(0, SIZE // GROUP, num_stages=STAGES):
        place = line.to(tl.int64)[:, None] * width + group * half + in_group[None, :]
        w = tl.load(weight + place)
        x_at = x + row.to(tl.int64)[None, :] * SIZE + group * GROUP + in_group[:, None]
        low = tl.load(x_at, mask=(row < rows)[None, :], other=0.0)
        if CODE < 2:
            part = tl.dot(w.to(kind), low)
        else:
            high = tl.load(x_at + half, mask=(row < rows)[None, :], other=0.0)
            code = w.to(tl.int32)
            if CODE == 2:
                zero = tl.full([1], 8, tl.float32)
                if ZEROS:
                    zero = tl.load(zeros + line * (SIZE // GROUP) + group).to(tl.float32)
                first = ((code & 15).to(tl.float32) - zero[:, None]).to(kind)
                second = ((code >> 4).to(tl.float32) - zero[:, None]).to(kind)
            else:
                first = e2m1_numbers(code & 15).to(kind)
                second = e2m1_numbers(code >> 4).to(kind)
            part = tl.dot(first, low)
            part = tl.dot(second, high, part)
        scale = tl.load(scales + line * (SIZE // GROUP) + group)
        if CODE == 3:
            scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        acc += part * scale.to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(target, acc, mask=known[:, None] & (row < rows)[None, :])


def small_gemm(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, *, code: Code, group: int
) -> Tensor:
    """`x @ weight.T` for up to `MAX_SMALL_ROWS` rows of `x`."""
    rows, size = x.shape
    outputs = len(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tile = 32 if outputs < 8192 else 64
    _small_gemm[(triton.cdiv(outputs, tile),)](
        x, weight, scales, scales if zeros is None else zeros, out, rows,
        OUTPUTS=outputs, SIZE=size, ROWS=max(16, triton.next_power_of_2(rows)), N=tile,
        GROUP=group, CODE=int(code), ZEROS=zeros is not None, STAGES=4, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize(weight, scales, zeros, out, SIZE: tl.constexpr, GROUP: tl.constexpr,
                GROUPS: tl.constexpr, CODE: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    there = group < SIZE // GROUP
    half: tl.constexpr = GROUP // 2 if CODE >= 2 else GROUP
    width: tl.constexpr = SIZE // 2 if CODE >= 2 else SIZE
    in_group = tl.arange(0, half)
    place = line * width + group[:, None] * half + in_group[None, :]
    if CODE < 2:
        w = tl.load(weight + place, mask=there[:, None], other=0.0)
    else:
        w = tl.load(weight + place, mask=there[:, None], other=0)
    at = line * (SIZE // GROUP) + group
    scale = tl.load(scales + at, mask=there, other=0)
    if CODE == 3:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    scale = scale.to(tl.float32)[:, None]
    target = out + line * SIZE + group[:, None] * GROUP + in_group[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    if CODE < 2:
        tl.store(target, (w.to(tl.float32) * scale).to(kind), mask=there[:, None])
    else:
        code = w.to(tl.int32)
        if CODE == 2:
            zero = tl.full([1], 8, tl.float32)
            if ZEROS:
                zero = tl.load(zeros + at, mask=there, other=8).to(tl.float32)
            first = (code & 15).to(tl.float32) - zero[:, None]
            second = (code >> 4).to(tl.float32) - zero[:, None]
        else:
            first = e2m1_numbers(code & 15)
            second = e2m1_numbers(code >> 4)
        tl.store(target, (first * scale).to(kind), mask=there[:, None])
        tl.store(target + half, (second * scale).to(kind), mask=there[:, None])


def dequantize(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    code: Code,
    group: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The dequantised weight, `[outputs, size]`, in new memory."""
    out = torch.empty((len(weight), size), dtype=dtype, device=weight.device)
    groups = triton.next_power_of_2(min(size, 2048)) // group
    _dequantize[(len(weight), triton.cdiv(size // group, groups))](
        weight, scales, scales if zeros is None else zeros, out, SIZE=size, GROUP=group,
        GROUPS=groups, CODE=int(code), ZEROS=zeros is not None,
    )  # fmt: skip
    return out
