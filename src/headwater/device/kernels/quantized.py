"""Formats of quantised weights, `[outputs, inputs]` like all weights, and their conversion.

    FP8 by row      e4m3 numbers, a scale for each output
    FP8 by group    e4m3 numbers, a scale for each output and group of inputs
    INT4 by group   codes in quarters of a chunk of inputs, as `unpack` describes
    MXFP4           e2m1 codes in quarters of 32 inputs, a power of two for each output and 32 inputs

Products with one row are in `quantized_gemv`, with several rows in `fp8_gemm` and `int4_gemm`.
For the rest, torch's FP8 products are used, or weights are dequantised into memory first.
"""

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.rows import gated_values


class Code(IntEnum):
    """How elements are stored."""

    FP8_ROW = 0
    FP8_GROUP = 1
    INT4 = 2
    MXFP4 = 3


MAX_SMALL_ROWS = 32
"""Largest batch of `small_gemm`."""


@triton.jit
def _store_row(values, codes, scales, row, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Store the elements of a row and their scale."""
    at = tl.arange(0, BLOCK)
    top = tl.maximum(tl.max(tl.abs(values), 0), 1e-10)
    tl.store(scales + row, top / 448.0)
    values = (values * (448.0 / top)).to(tl.float8e4nv)
    tl.store(codes + row * SIZE + at, values, mask=at < SIZE)


@triton.jit
def _store_groups(values, codes, scales, row, first, stride, SIZE: tl.constexpr,
                  BLOCK: tl.constexpr) -> None:  # fmt: skip
    """Store elements of a row from `first` on, and a scale for each 128 of them."""
    groups: tl.constexpr = BLOCK // 128
    values = tl.reshape(values, (groups, 128))
    top = tl.maximum(tl.max(tl.abs(values), 1), 1e-10)
    group = first // 128 + tl.arange(0, groups)
    tl.store(scales + group * stride + row, top / 448.0, mask=group < SIZE // 128)
    values = tl.reshape(values * (448.0 / top)[:, None], (BLOCK,)).to(tl.float8e4nv)
    at = first + tl.arange(0, BLOCK)
    tl.store(codes + row * SIZE + at, values, mask=at < SIZE)


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
    _store_row(values, codes, scales, row, SIZE, BLOCK)


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
def _quantize_groups(x, weight, codes, scales, epsilon, stride, SIZE: tl.constexpr,
                     BLOCK: tl.constexpr, NORMED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < SIZE
    values = tl.load(x + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
        values = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    _store_groups(values, codes, scales, row, first, stride, SIZE, BLOCK)


def quantize_groups(
    x: Tensor, norm: tuple[Tensor, float] | None, padded: int
) -> tuple[Tensor, Tensor]:
    """Like `quantize_rows`, with a scale for each row and 128 inputs: `[padded, size]` elements
    and `[groups, padded]` scales. Entries after the rows of `x` are undefined."""
    rows, size = x.shape
    codes = torch.empty((padded, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((size // 128, padded), dtype=torch.float32, device=x.device)
    weight, epsilon = norm or (x, 0.0)
    # A norm needs the whole row.
    block = triton.next_power_of_2(size) if norm is not None else min(2048, size & -size)
    early = starts_early(x)
    _quantize_groups[(rows, triton.cdiv(size, block))](
        x, weight, codes, scales, epsilon, padded, SIZE=size, BLOCK=block,
        NORMED=norm is not None, EARLY=early, num_warps=8 if block > 4096 else 4,
        launch_pdl=early,
    )  # fmt: skip
    return codes, scales


@triton.jit
def _quantize_gated(x, codes, scales, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                    BY_ROW: tl.constexpr, ACTIVATION: tl.constexpr, HALVES: tl.constexpr,
                    EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    values = gated_values(x, row, first, SIZE, BLOCK, ACTIVATION, HALVES)
    if BY_ROW:
        _store_row(values, codes, scales, row, SIZE, BLOCK)
    else:
        _store_groups(values, codes, scales, row, first, stride, SIZE, BLOCK)


def quantize_gated(
    x: Tensor,
    activation: GateActivation,
    padded: int,
    *,
    by_row: bool,
    in_halves: bool,
) -> tuple[Tensor, Tensor]:
    """`quantize_rows` or `quantize_groups` of what `rows.gate` gives."""
    rows, size = x.shape[0], x.shape[1] // 2
    codes = torch.empty((padded, size), dtype=torch.float8_e4m3fn, device=x.device)
    shape = (padded, 1) if by_row else (size // 128, padded)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size) if by_row else min(2048, size & -size)
    early = starts_early(x)
    _quantize_gated[(rows, triton.cdiv(size, block))](
        x, codes, scales, padded, SIZE=size, BLOCK=block, BY_ROW=by_row,
        ACTIVATION=int(activation), HALVES=in_halves, EARLY=early,
        num_warps=16 if block > 4096 else 4, launch_pdl=early,
    )  # fmt: skip
    return codes, scales


@triton.jit(do_not_specialize=["rows"])
def _small_gemm(x, weight, scales, out, rows, line_stride, group_stride, OUTPUTS: tl.constexpr,
                SIZE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr,
                STAGES: tl.constexpr):  # fmt: skip
    """A tile of outputs for all rows, a group of inputs at a time: `[outputs, rows]`."""
    output = tl.program_id(0) * N + tl.arange(0, N)
    known = output < OUTPUTS
    line = tl.where(known, output, 0)
    row = tl.arange(0, ROWS)
    in_group = tl.arange(0, GROUP)
    acc = tl.zeros([N, ROWS], tl.float32)
    for group in tl.range(0, SIZE // GROUP, num_stages=STAGES):
        place = line.to(tl.int64)[:, None] * SIZE + group * GROUP + in_group[None, :]
        w = tl.load(weight + place)
        x_at = x + row.to(tl.int64)[None, :] * SIZE + group * GROUP + in_group[:, None]
        values = tl.load(x_at, mask=(row < rows)[None, :], other=0.0)
        scale = tl.load(scales + line * line_stride + group * group_stride)
        acc += tl.dot(w.to(x.dtype.element_ty), values) * scale[:, None]
    target = out + row.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(target, acc, mask=known[:, None] & (row < rows)[None, :])


def small_gemm(x: Tensor, weight: Tensor, scales: Tensor, *, group: int) -> Tensor:
    """`x @ weight.T` for up to `MAX_SMALL_ROWS` rows of `x` and an FP8 weight by group."""
    rows, size = x.shape
    outputs = len(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tile = 32 if outputs < 8192 else 64
    _small_gemm[(triton.cdiv(outputs, tile),)](
        x, weight, scales, out, rows, *scales.stride(), OUTPUTS=outputs, SIZE=size,
        ROWS=max(16, triton.next_power_of_2(rows)), N=tile, GROUP=group, STAGES=4, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def e2m1_values(code):  # noqa: ANN201 - Triton's own types
    """Values of 4-bit codes `s e e m`, as float32."""
    # The three low bits are exponent and fraction of a float32 that is 2 ** 126 too small.
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _dequantize(weight, scales, zeros, out, SIZE: tl.constexpr, GROUP: tl.constexpr,
                GROUPS: tl.constexpr, CODE: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    known = (group < SIZE // GROUP)[:, None]
    at = line * (SIZE // GROUP) + group[:, None]
    scale = tl.load(scales + at, mask=known, other=0)
    if CODE == 3:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    scale = scale.to(tl.float32)
    zero = tl.full([1, 1], 8, tl.float32)
    if ZEROS:
        zero = tl.load(zeros + at, mask=known, other=8).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    parts: tl.constexpr = 4 if CODE >= 2 else 1
    width: tl.constexpr = GROUP // parts
    in_part = tl.arange(0, width)[None, :]
    place = line * (SIZE // parts) + group[:, None] * width + in_part
    nothing: tl.constexpr = 0.0 if CODE < 2 else 0
    w = tl.load(weight + place, mask=known, other=nothing)
    for part in tl.static_range(parts):
        if CODE < 2:
            values = w.to(tl.float32)
        else:
            code = (w.to(tl.int32) >> (4 * part)) & 15
            values = code.to(tl.float32) - zero if CODE == 2 else e2m1_values(code)
        target = out + line * SIZE + group[:, None] * GROUP + part * width + in_part
        tl.store(target, (values * scale).to(kind), mask=known)


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
        weight.view(torch.int16) if code >= Code.INT4 else weight, scales,
        scales if zeros is None else zeros, out, SIZE=size, GROUP=group, GROUPS=groups,
        CODE=int(code), ZEROS=zeros is not None,
    )  # fmt: skip
    return out
