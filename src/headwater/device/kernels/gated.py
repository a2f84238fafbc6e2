"""Gate and up as one GEMM with a fused activation epilogue: their result is never written.

Rows of gate and up are interleaved in the weight, so one tile is one GEMM and each thread has
both numbers of an output. For Hopper and later: TMA loads and stores tiles. With many rows, each
program computes tiles one after another. With few rows, reading weights takes the time: the GEMM
is transposed, `[outputs, rows]`, so that weights fill the longer side of the tensor cores and
padding rows cost little.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.device.kernels.activation import GateActivation, activate
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.rows import gate

_TILE_ROWS, _OUTPUTS, _INPUTS = 128, 128, 64
"""Rows and outputs of a tile, and inputs per iteration."""

_MAX_TRANSPOSED_ROWS, _TRANSPOSED_OUTPUTS = 64, 64
"""Up to this many rows the product is transposed, with this many outputs per tile."""

MIN_EAGER_ROWS = 1024
"""Outside graphs, fewer rows are computed by two kernels: a launch with descriptors takes the
host longer than few rows take the device."""

_BAND = 16
"""Tiles run in bands of this many rows of tiles, so that tiles that run together read the same
memory.
"""

_MAX_PADDING = 1.15
"""Limit of padded rows over rows: more padding costs more than the fused activation saves."""


# Otherwise a step with a new number of rows could wait for the compiler.
@triton.jit(do_not_specialize=["rows"])
def _gated(x, weight, out, rows, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr,
           N: tl.constexpr, K: tl.constexpr, BAND: tl.constexpr, ACTIVATION: tl.constexpr):  # fmt: skip
    tiles_down = tl.cdiv(rows, M)
    tiles_across: tl.constexpr = OUTPUTS // N
    for tile in range(tl.program_id(0), tiles_down * tiles_across, tl.num_programs(0)):
        band = tile // (BAND * tiles_across)
        in_band = tile - band * (BAND * tiles_across)
        height = tl.minimum(tiles_down - band * BAND, BAND)
        first_row = (band * BAND + in_band % height) * M
        first = (in_band // height) * N
        both = tl.zeros([M, 2 * N], tl.float32)
        for at in range(0, SIZE, K):
            both = tl.dot(x.load([first_row, at]), weight.load([2 * first, at]).T, both)
        gate, up = tl.split(tl.reshape(both, (M, N, 2)))
        result = activate(gate, up, 0.0, 0.0, ACTIVATION)
        out.store([first_row, first], result.to(out.dtype))


@triton.jit(do_not_specialize=["rows"])
def _transposed(x, weight, out, rows, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
            N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    first = tl.program_id(0) * N
    both = tl.zeros([2 * N, ROWS], tl.float32)
    for at in range(0, SIZE, K):
        both = tl.dot(weight.load([2 * first, at]), x.load([0, at]).T, both)
    gate, up = tl.split(tl.permute(tl.reshape(both, (N, 2, ROWS)), (0, 2, 1)))
    row = tl.arange(0, ROWS)
    place = row[None, :].to(tl.int64) * OUTPUTS + (first + tl.arange(0, N))[:, None]
    result = activate(gate, up, 0.0, 0.0, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + place, result, mask=(row < rows)[None, :])


def gate_up(
    x: Tensor,
    weight: Tensor,
    *,
    is_eager: bool,
    activation: GateActivation = GateActivation.SILU,
) -> Tensor:
    """`activation(x @ gate.T) * (x @ up.T)`; `weight` has the rows interleaved.

    `is_eager` means that this is not part of a graph.
    """
    rows = len(x)
    is_small = is_eager and rows < MIN_EAGER_ROWS
    if not is_small and _fits(weight):
        if rows <= _MAX_TRANSPOSED_ROWS:
            return _gate_up_transposed(x, weight, activation)
        if triton.cdiv(rows, _TILE_ROWS) * _TILE_ROWS <= rows * _MAX_PADDING:
            return _gate_up_tiled(x, weight, activation)
    return gate(torch.mm(x, weight.T), activation)


def _gate_up_transposed(x: Tensor, weight: Tensor, activation: GateActivation) -> Tensor:
    """`gate_up` in one kernel, transposed."""
    rows, size = x.shape
    outputs = weight.shape[0] // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tile = max(16, triton.next_power_of_2(rows))
    early = starts_early(x)
    _transposed[(outputs // _TRANSPOSED_OUTPUTS,)](
        TensorDescriptor.from_tensor(x, [tile, _INPUTS]),
        TensorDescriptor.from_tensor(weight, [2 * _TRANSPOSED_OUTPUTS, _INPUTS]),
        out,
        rows,
        OUTPUTS=outputs,
        SIZE=size,
        ROWS=tile,
        N=_TRANSPOSED_OUTPUTS,
        K=_INPUTS,
        ACTIVATION=int(activation),
        EARLY=early,
        num_warps=4,
        num_stages=4,
        launch_pdl=early,
    )
    return out


def _gate_up_tiled(x: Tensor, weight: Tensor, activation: GateActivation) -> Tensor:
    """`gate_up` in one kernel, whose programs compute tile after tile."""
    rows, size = x.shape
    outputs = weight.shape[0] // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    grid = min(processors, triton.cdiv(rows, _TILE_ROWS) * (outputs // _OUTPUTS))
    _gated[(grid,)](
        TensorDescriptor.from_tensor(x, [_TILE_ROWS, _INPUTS]),
        TensorDescriptor.from_tensor(weight, [2 * _OUTPUTS, _INPUTS]),
        TensorDescriptor.from_tensor(out, [_TILE_ROWS, _OUTPUTS]),
        rows,
        OUTPUTS=outputs,
        SIZE=size,
        M=_TILE_ROWS,
        N=_OUTPUTS,
        K=_INPUTS,
        ACTIVATION=int(activation),
        BAND=_BAND,
        num_warps=8,
        num_stages=3 if rows >= MIN_EAGER_ROWS else 4,
    )
    return out


def _fits(weight: Tensor) -> bool:
    """Whether TMA can load the tiles of this weight."""
    return (
        weight.element_size() == 2
        and weight.shape[0] % (2 * _OUTPUTS) == 0
        and weight.shape[1] % _INPUTS == 0
        and torch.cuda.get_device_capability(weight.device) >= (9, 0)
    )
