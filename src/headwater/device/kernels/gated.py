"""Gate and up in one product with the activation inside, so that its input is never written.

For Hopper and later: tiles come by the copy engine of each processor (TMA). Each program
takes tiles of outputs one after another, and of a tile computes both halves.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.device.kernels.rows import gate

_OUTPUTS, _INPUTS = 128, 64
"""Outputs of a tile, and inputs read in a turn."""

LEAST_ROWS = 48
"""Fewer are the reading of weights, which cuBLAS does as fast."""

LEAST_ROWS_LAUNCHED = 1024
"""The same outside of graphs: a launch with descriptors takes the host longer than few rows take
the device."""

_MOST_PADDING = 1.15
"""Rows of tiles over rows: more of what is not there costs more than the activation."""


@triton.jit(do_not_specialize=["rows"])  # or each new number could stop a step to compile
def _gated(x, weight, out, rows, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr,
           N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    tiles_down = tl.cdiv(rows, M)
    tiles_across: tl.constexpr = OUTPUTS // N
    for tile in range(tl.program_id(0), tiles_down * tiles_across, tl.num_programs(0)):
        # Tiles at work together share what they read: 16 down, then the next 16 beside them.
        band = tile // (16 * tiles_across)
        in_band = tile - band * (16 * tiles_across)
        height = tl.minimum(tiles_down - band * 16, 16)
        first_row = (band * 16 + in_band % height) * M
        first = (in_band // height) * N
        gate = tl.zeros([M, N], tl.float32)
        up = tl.zeros([M, N], tl.float32)
        for at in range(0, SIZE, K):
            values = x.load([first_row, at])
            gate = tl.dot(values, weight.load([first, at]).T, gate)
            up = tl.dot(values, weight.load([OUTPUTS + first, at]).T, up)
        row = first_row + tl.arange(0, M)
        place = row[:, None].to(tl.int64) * OUTPUTS + (first + tl.arange(0, N))[None, :]
        result = gate * tl.sigmoid(gate) * up
        tl.store(out + place, result.to(out.dtype.element_ty), mask=(row < rows)[:, None])


def gate_up(x: Tensor, weight: Tensor, least_rows: int) -> Tensor:
    """`silu(x @ left.T) * (x @ right.T)` with `weight` the rows of left, then of right.

    Fewer than `least_rows` are computed by two kernels.
    """
    if len(x) >= least_rows and _fits(weight, len(x)):
        return _fused(x, weight)
    return gate(torch.mm(x, weight.T))


def _fused(x: Tensor, weight: Tensor) -> Tensor:
    """The same in one kernel, for weights and rows that `_fits` says yes to."""
    rows, size = x.shape
    outputs = weight.shape[0] // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    m = _tile_rows(rows)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    grid = min(processors, triton.cdiv(rows, m) * (outputs // _OUTPUTS))
    _gated[(grid,)](
        TensorDescriptor.from_tensor(x, [m, _INPUTS]),
        TensorDescriptor.from_tensor(weight, [_OUTPUTS, _INPUTS]),
        out,
        rows,
        OUTPUTS=outputs,
        SIZE=size,
        M=m,
        N=_OUTPUTS,
        K=_INPUTS,
        num_warps=m // 16,
        num_stages=4,
    )
    return out


def _fits(weight: Tensor, num_rows: int) -> bool:
    """Whether `_fused` computes this product, and is the faster way."""
    padded = triton.cdiv(num_rows, _tile_rows(num_rows)) * _tile_rows(num_rows)
    return (
        padded <= num_rows * _MOST_PADDING
        and weight.element_size() == 2
        and weight.shape[0] % (2 * _OUTPUTS) == 0
        and weight.shape[1] % _INPUTS == 0
        and torch.cuda.get_device_capability(weight.device) >= (9, 0)
    )


def _tile_rows(num_rows: int) -> int:
    return 64 if num_rows <= 64 else 128
