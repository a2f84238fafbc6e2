"""Products of several rows with a 4-bit weight: `[outputs, rows]`, as in `fp8_gemm`.

Codes are converted in registers, two at a time, into the form in which the tensor cores read
weights. There are four products for each chunk of 128 inputs: nibble j of its 16-bit numbers
belongs to its quarter j. With few rows, the sums of a chunk are multiplied by its scales; with
many rows, the weights are multiplied instead, because there are fewer of them than sums.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.copy_engine import can_copy
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.finish_tile import finish_tile
from headwater.device.kernels.unpack import int4_integers, int4_numbers

CHUNK = 128
"""Inputs that share a scale."""

MAX_ROWS = 128
"""Largest batch; larger ones are as fast with a dequantised weight."""

_QUARTER = CHUNK // 4

_MANY_LINES = 128 * 132
"""From this number of rows of the weight on, each processor of an H200 has a wide tile."""

_FEWEST_ROWS = 8
"""Up to this many rows, the tensor cores of single warps are used."""

_FEW_ROWS = 32
"""Up to this many rows, sums are multiplied by scales, not weights."""

_MANY_ROWS = 64
"""With more rows than this, one iteration less is read ahead: their tiles are large."""

_WIDE, _NARROW = 128, 64
"""Rows of the weight in a wide and in a narrow tile. The weight must have whole wide tiles."""

_MAX_SPLIT = 8


@triton.jit(do_not_specialize=["rows"])
def _int4_gemm(x, weight, scales, zeros, out, partial, arrived, rows, factor,
               OUTPUTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
               SPLIT: tl.constexpr, FEW: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr,
               ADDED: tl.constexpr, ACTIVATION: tl.constexpr, STAGES: tl.constexpr,
               EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    kind: tl.constexpr = scales.dtype
    above: tl.constexpr = 128 if kind == tl.bfloat16 else 1024
    tile = tl.program_id(0)
    part = tl.program_id(1)
    chunks: tl.constexpr = SIZE // 128
    each: tl.constexpr = (chunks + SPLIT - 1) // SPLIT
    begin = part * each
    acc = tl.zeros([N, ROWS], tl.float32)
    for chunk in tl.range(begin, tl.minimum(begin + each, chunks), num_stages=STAGES):
        w = weight.load([tile * N, chunk * 32])
        x0 = x.load([0, chunk * 128]).T
        x1 = x.load([0, chunk * 128 + 32]).T
        x2 = x.load([0, chunk * 128 + 64]).T
        x3 = x.load([0, chunk * 128 + 96]).T
        scale = tl.reshape(scales.load([chunk, tile * N]), (N, 1))
        zero = tl.full([1, 1], 8 + above, tl.float32)
        if ZEROS:
            zero = tl.reshape(zeros.load([chunk, tile * N]), (N, 1)).to(tl.float32) + above
        zero = tl.broadcast_to(zero.to(kind), (N, 32))
        if FEW:
            w0, w1, w2, w3 = int4_integers(w, zero)
            group = tl.dot(w0, x0)
            group = tl.dot(w1, x1, group)
            group = tl.dot(w2, x2, group)
            acc += tl.dot(w3, x3, group) * scale.to(tl.float32)
        else:
            w0, w1, w2, w3 = int4_numbers(w, zero, tl.broadcast_to(scale, (N, 32)))
            acc = tl.dot(w0, x0, acc)
            acc = tl.dot(w1, x1, acc)
            acc = tl.dot(w2, x2, acc)
            acc = tl.dot(w3, x3, acc)
    finish_tile(acc, out, partial, partial, partial, arrived, rows, factor, tile, part, OUTPUTS,
                ROWS, N, SPLIT, False, GATED, ADDED, ACTIVATION)  # fmt: skip


class _Shape(NamedTuple):
    """How a product is cut into programs."""

    lines: int
    """Rows of the weight in a tile."""

    split: int
    """Programs that share a tile."""

    stages: int
    warps: int


def int4_gemm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    arrived: Tensor,
    *,
    is_gated: bool = False,
    residual: Tensor | None = None,
    factor: float = 1.0,
    activation: GateActivation = GateActivation.SILU,
) -> Tensor:
    """`x @ weight.T`; then gated, or multiplied by `factor` and added to `residual` in place.

    `scales` and `zeros` are `[outputs, chunks]` of the type of `x`, and are stored transposed. `arrived` is as
    in `fp8_gemm`.
    """
    rows, size = x.shape
    lines = len(weight)
    outputs = lines // 2 if is_gated else lines
    out = residual
    if out is None:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    width = max(8, triton.next_power_of_2(rows))
    shape = _shape(lines, size, rows)
    tiles = lines // shape.lines
    partial = arrived
    if shape.split > 1:
        partial = torch.empty(tiles * shape.split * shape.lines * width, device=x.device)
    of_lines = [1, shape.lines]
    described = TensorDescriptor.from_tensor(scales.T, of_lines)
    early = starts_early(x)
    _int4_gemm[(tiles, shape.split)](
        TensorDescriptor.from_tensor(x, [width, _QUARTER]),
        TensorDescriptor.from_tensor(weight.view(torch.int16), [shape.lines, _QUARTER]),
        described,
        described if zeros is None else TensorDescriptor.from_tensor(zeros.T, of_lines),
        out, partial, arrived, rows, factor, OUTPUTS=outputs, SIZE=size, ROWS=width,
        N=shape.lines, SPLIT=shape.split, FEW=rows <= _FEW_ROWS, ZEROS=zeros is not None,
        GATED=is_gated, ADDED=residual is not None, ACTIVATION=int(activation),
        STAGES=shape.stages, EARLY=early, num_warps=shape.warps, launch_pdl=early,
    )  # fmt: skip
    return out


def fits(weight: Tensor, scales: Tensor, zeros: Tensor | None, num_rows: int) -> bool:
    """Whether `int4_gemm` supports this product."""
    return (
        num_rows <= MAX_ROWS
        and can_copy_weight(weight, scales, zeros)
        and weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) >= (9, 0)
    )


def can_copy_weight(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> bool:
    """Whether a weight consists of whole tiles, and the copy engine can read them."""
    of_lines = (1, _NARROW)
    return (
        len(weight) % _WIDE == 0
        and scales.shape[1] * CHUNK == weight.shape[1] * 2
        and can_copy(weight.view(torch.int16), (_NARROW, _QUARTER))
        and can_copy(scales.T, of_lines)
        and (zeros is None or can_copy(zeros.T, of_lines))
    )


def _shape(lines: int, size: int, rows: int) -> _Shape:
    """The fastest shape of about six on an H200. If there are few tiles, several programs share
    each of them, so that every processor has work. With more rows fewer programs share a tile,
    because their sums take longer to write and add."""
    stages = 4 if rows <= _MANY_ROWS else 3
    if lines >= _MANY_LINES:
        return _Shape(_WIDE, 1, stages, 4 if rows <= _FEWEST_ROWS else 8)
    tiles = lines // _NARROW
    most = 256
    if rows <= _FEW_ROWS:
        most = 768 if rows <= _FEWEST_ROWS else 512
    split = 1
    while split < _MAX_SPLIT and tiles * split * 2 <= most and size // CHUNK >= 8 * split:
        split *= 2
    return _Shape(_NARROW, split, stages, 4)
