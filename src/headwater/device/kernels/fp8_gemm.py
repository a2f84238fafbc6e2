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

from headwater.device.kernels.activation import GateActivation, activate
from headwater.device.kernels.early import start_early, starts_early

MAX_ROWS, MAX_DEEP_ROWS = 64, 128
"""Largest batch, and the largest batch of a product with many inputs, for which torch leaves
processors idle. torch computes larger batches."""

_DEEP = 8192
"""From this number of inputs on, a product has many inputs."""

_INPUTS = 128
"""Inputs per iteration."""

_TILE = 64
"""Outputs of a tile."""

_STAGES = 4
"""Iterations that are read ahead."""


@triton.jit(do_not_specialize=["rows"])
def _fp8_gemm(x, weight, x_scales, w_scales, out, partial, arrived, rows, factor,
              OUTPUTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
              K: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
              ACTIVATION: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """`N` is the number of rows of the weight in a tile, and `OUTPUTS` the number of outputs of
    the result."""
    start_early(EARLY)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    turns: tl.constexpr = SIZE // K
    each: tl.constexpr = (turns + SPLIT - 1) // SPLIT
    begin = part * each
    acc = tl.zeros([N, ROWS], tl.float32)
    for turn in tl.range(begin, tl.minimum(begin + each, turns), num_stages=STAGES):
        acc = tl.dot(weight.load([tile * N, turn * K]), x.load([0, turn * K]).T, acc)
    line = tile * N + tl.arange(0, N)
    row = tl.arange(0, ROWS)
    is_last = True
    if SPLIT > 1:
        place = row[None, :] * N + tl.arange(0, N)[:, None]
        own = partial + (tile * SPLIT).to(tl.int64) * (N * ROWS)
        tl.store(own + part * (N * ROWS) + place, acc)
        tl.debug_barrier()  # all threads must have written before one of them counts
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            tl.store(arrived + tile, 0)
            acc = tl.zeros([N, ROWS], tl.float32)
            for number in range(SPLIT):
                acc += tl.load(own + number * (N * ROWS) + place, cache_modifier=".cg")
    if is_last:
        total = acc * tl.load(w_scales + line)[:, None]
        total = total * tl.load(x_scales + row, mask=row < rows, other=0.0)[None, :]
        known = (row < rows)[None, :]
        at_row = out + row[None, :].to(tl.int64) * OUTPUTS
        if GATED:
            # Rows of gate and up are interleaved: they become the last dimension, which `split`
            # takes apart.
            gate, up = tl.split(tl.permute(tl.reshape(total, (N // 2, 2, ROWS)), (0, 2, 1)))
            gated = activate(gate, up, 0.0, 0.0, ACTIVATION)
            output = tile * (N // 2) + tl.arange(0, N // 2)
            tl.store(at_row + output[:, None], gated.to(out.dtype.element_ty), mask=known)
        else:
            target = at_row + line[:, None]
            if ADDED:
                before = tl.load(target, mask=known, other=0.0).to(tl.float32)
                total = total * factor + before
            tl.store(target, total.to(out.dtype.element_ty), mask=known)


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
    """`x @ weight.T` of quantised rows; gated, or added to `residual` in place times `factor`.

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
    split = _split(tiles, size)
    partial = scales
    if split > 1:
        partial = torch.empty(tiles * split * tile * width, device=codes.device)
    early = starts_early(codes)
    _fp8_gemm[(tiles, split)](
        TensorDescriptor.from_tensor(codes, [width, _INPUTS]),
        TensorDescriptor.from_tensor(weight, [tile, _INPUTS]),
        scales, weight_scales, out, partial, arrived, rows, factor,
        OUTPUTS=outputs, SIZE=size, ROWS=width, N=tile, K=_INPUTS, SPLIT=split, GATED=is_gated,
        ADDED=residual is not None, ACTIVATION=int(activation), STAGES=_STAGES,
        EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out


def num_counters(outputs: int) -> int:
    """Counters for products with a weight of this many outputs."""
    return -(-outputs // _TILE)


def fits(weight: Tensor, num_rows: int) -> bool:
    """Whether `fp8_gemm` supports this product."""
    return (
        num_rows <= (MAX_DEEP_ROWS if weight.shape[1] >= _DEEP else MAX_ROWS)
        and len(weight) % (2 * _TILE) == 0
        and weight.shape[1] % _INPUTS == 0
        and weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) >= (9, 0)
    )


def _split(tiles: int, size: int) -> int:
    """Programs that share a tile: about two per processor, and several iterations each."""
    split = 1
    while tiles * split * 2 <= 280 and size // _INPUTS >= 8 * split:
        split *= 2
    return split
