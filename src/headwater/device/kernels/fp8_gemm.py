"""Products of few rows with an FP8 weight, on the FP8 tensor cores: `[outputs, rows]`.

As in `gated`, weights fill the longer side of the tensor cores. Rows are quantised before, each
with its own scale. If there are too few outputs for all processors, inputs are split among
programs. The program that finishes a tile last adds the parts in order, so results do not
depend on timing.
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

MAX_ROWS = 128
"""Largest batch; torch computes larger ones, because its tiles fit them better."""

_DEEP = 8192
"""From this number of inputs on, splitting the inputs costs little beside reading them."""

_INPUTS = 128
"""Inputs per iteration."""

_TILE = 64
"""Outputs of a tile; a gated one has twice as many rows of the weight."""

_FEW_ROWS = 64
"""Up to this many rows, the sums of a tile are small, so splitting the inputs costs little."""


@triton.jit(do_not_specialize=["rows"])
def _fp8_gemm(x, weight, x_scales, w_scales, out, partial, arrived, rows, factor,
              OUTPUTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
              K: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
              ACTIVATION: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Compute one tile, or a part of its inputs. `N` is the number of rows of the weight in a
    tile, and `OUTPUTS` the number of outputs of the result."""
    start_early(EARLY)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    turns: tl.constexpr = SIZE // K
    each: tl.constexpr = (turns + SPLIT - 1) // SPLIT
    begin = part * each
    acc = tl.zeros([N, ROWS], tl.float32)
    for turn in tl.range(begin, tl.minimum(begin + each, turns), num_stages=STAGES):
        acc = tl.dot(weight.load([tile * N, turn * K]), x.load([0, turn * K]).T, acc)
    finish_tile(acc, out, x_scales, w_scales, partial, arrived, rows, factor, tile, part, OUTPUTS,
                ROWS, N, SPLIT, True, GATED, ADDED, ACTIVATION)  # fmt: skip


def fp8_gemm(
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
    """`x @ weight.T` of quantised rows; then gated, or multiplied by `factor` and added to
    `residual` in place.

    `arrived` are `num_counters` integers that count finished parts; they are zero before and
    after.
    """
    rows, size = codes.shape
    lines = len(weight)
    outputs = lines // 2 if is_gated else lines
    tile = 2 * _TILE if is_gated else _TILE
    tiles = lines // tile
    out = residual
    if out is None:
        out = torch.empty((rows, outputs), dtype=dtype, device=codes.device)
    width = max(16, triton.next_power_of_2(rows))
    split = _split(tiles, size, rows)
    partial = scales
    if split > 1:
        partial = torch.empty(tiles * split * tile * width, device=codes.device)
    early = starts_early(codes)
    _fp8_gemm[(tiles, split)](
        TensorDescriptor.from_tensor(codes, [width, _INPUTS]),
        TensorDescriptor.from_tensor(weight, [tile, _INPUTS]),
        scales, weight_scales, out, partial, arrived, rows, factor,
        OUTPUTS=outputs, SIZE=size, ROWS=width, N=tile, K=_INPUTS, SPLIT=split, GATED=is_gated,
        ADDED=residual is not None, ACTIVATION=int(activation),
        STAGES=_stages(rows, is_gated=is_gated), EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out


def num_counters(outputs: int) -> int:
    """Counters for products with a weight of this many outputs."""
    return -(-outputs // _TILE)


def fits(weight: Tensor, num_rows: int) -> bool:
    """Whether `fp8_gemm` supports this product."""
    return (
        num_rows <= MAX_ROWS
        and len(weight) % (2 * _TILE) == 0
        and weight.shape[1] % _INPUTS == 0
        and can_copy(weight, (_TILE, _INPUTS))
        and weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) >= (9, 0)
    )


def _split(tiles: int, size: int, rows: int) -> int:
    """Number of programs that share a tile: as many as keep the processors busy, while each
    program still has several iterations. Fewer share a tile if writing its sums takes longer
    than reading its inputs."""
    most = 200 if rows <= _FEW_ROWS or size >= _DEEP else 100
    split = 1
    while tiles * split * 2 <= most and size // _INPUTS >= 8 * split:
        split *= 2
    return split


def _stages(rows: int, *, is_gated: bool) -> int:
    """Iterations that are read ahead: as many as leave room for two programs on a processor."""
    if not is_gated:
        return 6
    return 4 if rows <= _FEW_ROWS else 3
