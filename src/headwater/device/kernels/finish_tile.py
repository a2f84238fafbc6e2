"""The end of products `[outputs, rows]` whose inputs may be split among programs.

The program that finishes a tile last adds the parts in order, so results do not depend on timing.
"""

import triton
import triton.language as tl

from headwater.device.kernels.activation import activate


@triton.jit
def finish_tile(acc, out, row_scales, line_scales, partial, arrived, rows, factor, tile, part,
                OUTPUTS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
                SCALED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
                ACTIVATION: tl.constexpr) -> None:  # fmt: skip
    """Store the sums `[N, ROWS]` of a tile: multiplied by both scales if `SCALED`; then gated,
    or multiplied by `factor` and added to `out`. `N` is the number of rows of the weight in a
    tile, and `OUTPUTS` the number of outputs of the result."""
    if SPLIT == 1:
        _store(acc, out, row_scales, line_scales, rows, factor, tile, OUTPUTS, ROWS, N, SCALED,
               GATED, ADDED, ACTIVATION)  # fmt: skip
    else:
        place = tl.arange(0, ROWS)[None, :] * N + tl.arange(0, N)[:, None]
        own = partial + (tile * SPLIT).to(tl.int64) * (N * ROWS)
        tl.store(own + part * (N * ROWS) + place, acc)
        tl.debug_barrier()  # all threads must have written before one of them counts
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrived + tile, 0)
            total = tl.zeros([N, ROWS], tl.float32)
            for number in range(SPLIT):
                total += tl.load(own + number * (N * ROWS) + place, cache_modifier=".cg")
            _store(total, out, row_scales, line_scales, rows, factor, tile, OUTPUTS, ROWS, N,
                   SCALED, GATED, ADDED, ACTIVATION)  # fmt: skip


@triton.jit
def _store(total, out, row_scales, line_scales, rows, factor, tile, OUTPUTS: tl.constexpr,
           ROWS: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr,
           ADDED: tl.constexpr, ACTIVATION: tl.constexpr):  # fmt: skip
    line = tile * N + tl.arange(0, N)
    row = tl.arange(0, ROWS)
    known = (row < rows)[None, :]
    if SCALED:
        total = total * tl.load(line_scales + line)[:, None]
        total = total * tl.load(row_scales + row, mask=row < rows, other=0.0)[None, :]
    at_row = out + row[None, :].to(tl.int64) * OUTPUTS
    if GATED:
        # Rows of gate and up are interleaved: they become the last dimension, which `split`
        # takes apart.
        gate, up = tl.split(tl.permute(tl.reshape(total, (N // 2, 2, ROWS)), (0, 2, 1)))
        total = activate(gate, up, 0.0, 0.0, ACTIVATION)
        target = at_row + (tile * (N // 2) + tl.arange(0, N // 2))[:, None]
    else:
        target = at_row + line[:, None]
        if ADDED:
            total = total * factor + tl.load(target, mask=known, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=known)
