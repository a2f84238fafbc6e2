"""Products of several rows with an FP8 weight whose scales belong to groups of 128 inputs, on the
FP8 tensor cores.

Rows are quantised before, each group of 128 inputs with its own scale. The tensor cores add the
products of one group; then the sums are multiplied by both scales and added in float32. With few
rows, weights fill the longer side of the tensor cores, as in `fp8_gemm`: `[outputs, rows]`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.copy_engine import can_copy
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.finish_tile import finish_tile

GROUP = 128
"""Inputs that share a scale."""

MAX_TRANSPOSED_ROWS = 128
"""Up to this many rows the product is transposed."""

_LINES = 128
"""The weight must have a multiple of this many rows."""

_FEW_ROWS = 64
"""Up to this many rows, a transposed tile has half as many rows of the weight."""

_MANY_LINES = 128 * 132
"""From this number of rows of the weight on, each processor of an H200 has a wide tile."""

_TILE_ROWS = 128
_BAND = 8
"""Rows of a tile of many rows, and tiles of a band: those that run together read the same
memory."""


@triton.jit(do_not_specialize=["rows"])
def _transposed(x, weight, x_scales, w_scales, out, partial, arrived, rows, factor,
                OUTPUTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
                SPLIT: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
                ACTIVATION: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Compute one tile, or a part of its inputs. `N` is the number of rows of the weight in a
    tile."""
    start_early(EARLY)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    turns: tl.constexpr = SIZE // 128
    each: tl.constexpr = (turns + SPLIT - 1) // SPLIT
    begin = part * each
    row = tl.arange(0, ROWS)
    acc = tl.zeros([N, ROWS], tl.float32)
    for turn in tl.range(begin, tl.minimum(begin + each, turns), num_stages=STAGES):
        w = weight.load([tile * N, turn * 128])
        values = x.load([0, turn * 128]).T
        w_scale = tl.reshape(w_scales.load([turn, tile * N]), (N, 1))
        # Scales of rows that do not exist are undefined; their sums are not stored.
        x_scale = tl.load(x_scales + turn * ROWS + row)
        acc += (tl.dot(w, values) * w_scale) * x_scale[None, :]
    finish_tile(acc, out, partial, partial, partial, arrived, rows, factor, tile, part, OUTPUTS,
                ROWS, N, SPLIT, False, GATED, ADDED, ACTIVATION)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _tiled(x, weight, x_scales, w_scales, out, rows, x_stride, LINES: tl.constexpr,
           SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BAND: tl.constexpr,
           STAGES: tl.constexpr):  # fmt: skip
    across: tl.constexpr = LINES // N
    tile = tl.program_id(0)
    band = tile // (BAND * across)
    in_band = tile - band * (BAND * across)
    height = tl.minimum(tl.cdiv(rows, M) - band * BAND, BAND)
    first_row = (band * BAND + in_band % height) * M
    first = (in_band // height) * N
    row = first_row + tl.arange(0, M)
    line = first + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    for turn in tl.range(0, SIZE // 128, num_stages=STAGES):
        values = x.load([first_row, turn * 128])
        w = weight.load([first, turn * 128]).T
        x_scale = tl.load(x_scales + turn * x_stride + row)
        w_scale = tl.load(w_scales + turn * LINES + line)
        acc += (tl.dot(values, w) * x_scale[:, None]) * w_scale[None, :]
    place = out + row[:, None].to(tl.int64) * LINES + line[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None])


def scale_stride(rows: int) -> int:
    """Distance between the scales of neighbouring groups of this many quantised rows."""
    if rows <= MAX_TRANSPOSED_ROWS:
        return max(16, 1 << (rows - 1).bit_length())
    return -(-rows // _TILE_ROWS) * _TILE_ROWS


def fp8_block_gemm(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    arrived: Tensor,
    *,
    dtype: torch.dtype,
    is_gated: bool = False,
    residual: Tensor | None = None,
    factor: float = 1.0,
    activation: GateActivation = GateActivation.SILU,
) -> Tensor:
    """`x @ weight.T` of up to `MAX_TRANSPOSED_ROWS` quantised rows; then gated, or multiplied by
    `factor` and added to `residual` in place.

    `scales` are `[groups, scale_stride(rows)]`; `weight_scales` are `[outputs, groups]`, stored
    transposed. `arrived` is as in `fp8_gemm`.
    """
    rows, size = codes.shape
    lines = len(weight)
    outputs = lines // 2 if is_gated else lines
    out = residual
    if out is None:
        out = torch.empty((rows, outputs), dtype=dtype, device=codes.device)
    width = scales.shape[1]
    is_wide = rows > _FEW_ROWS and lines >= _MANY_LINES
    tile = _LINES if is_wide else _LINES // 2
    tiles = lines // tile
    split = _split(tiles, size)
    partial = scales
    if split > 1:
        partial = torch.empty(tiles * split * tile * width, device=codes.device)
    early = starts_early(codes)
    _transposed[(tiles, split)](
        TensorDescriptor.from_tensor(codes, [width, GROUP]),
        TensorDescriptor.from_tensor(weight, [tile, GROUP]),
        scales, TensorDescriptor.from_tensor(weight_scales.T, [1, tile]), out, partial, arrived,
        rows, factor, OUTPUTS=outputs, SIZE=size, ROWS=width, N=tile, SPLIT=split,
        GATED=is_gated, ADDED=residual is not None, ACTIVATION=int(activation),
        STAGES=6 if rows <= _FEW_ROWS else 4, EARLY=early, num_warps=8 if is_wide else 4,
        launch_pdl=early,
    )  # fmt: skip
    return out


def fp8_block_tiled(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """`x @ weight.T` of many quantised rows; parameters are as in `fp8_block_gemm`."""
    rows, size = codes.shape
    lines = len(weight)
    out = torch.empty((rows, lines), dtype=dtype, device=codes.device)
    _tiled[(triton.cdiv(rows, _TILE_ROWS) * (lines // _LINES),)](
        TensorDescriptor.from_tensor(codes, [_TILE_ROWS, GROUP]),
        TensorDescriptor.from_tensor(weight, [_LINES, GROUP]),
        scales, weight_scales, out, rows, scales.shape[1], LINES=lines, SIZE=size, M=_TILE_ROWS,
        N=_LINES, BAND=_BAND, STAGES=4, num_warps=8,
    )  # fmt: skip
    return out


def fits(weight: Tensor, scales: Tensor) -> bool:
    """Whether these products support a weight."""
    return (
        weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) == (9, 0)
        and len(weight) % _LINES == 0
        and can_copy(weight, (_LINES // 2, GROUP))
        and can_copy(scales.T, (1, _LINES // 2))
        and scales.stride(1) == len(weight)
    )


def _split(tiles: int, size: int) -> int:
    """Number of programs that share a tile: as many as keep the processors busy, while each
    program still has several iterations."""
    split = 1
    while tiles * split * 2 <= 256 and size // GROUP >= 8 * split:
        split *= 2
    return split
