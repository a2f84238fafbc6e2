"""Products of one row with a large weight, which is read once at memory speed.

With one sequence, the time of a step is that of reading the weights. The norm before a product
and the gate or residual after it are fused, so they need no separate pass or launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import GateActivation, activate
from headwater.device.kernels.early import REQUEST_UNIT, request, start_early, starts_early

_FEW_OUTPUTS = 512
"""Outputs of a router: with tiles of two, every processor has work."""

_UNIT = 256
"""The number of inputs is a multiple of this."""

FP8_SHAPES = {
    (True, True): (16, 256, 4),
    (True, False): (16, 256, 4),
    (False, True): (16, 512, 3),
    (False, False): (8, 512, 4),
}
"""Tile shapes for FP8 weights, by whether the product is gated and normalised: the fastest of 7
on an H200."""


@triton.jit
def _gemv(
    x,
    weight,
    scales,
    norm_weight,
    residual,
    out,
    epsilon,
    factor,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    REQUESTED: tl.constexpr,
):
    if REQUESTED > 0:
        lines: tl.constexpr = 2 * N if GATED else N
        slab = weight + tl.program_id(0).to(tl.int64) * (lines * SIZE)
        # Before `start_early`: no kernel writes weights, so they come while the kernel before
        # still runs.
        request(slab, REQUESTED, EARLY, 4)
    start_early(EARLY)
    output = tl.program_id(0) * N + tl.arange(0, N)
    known = output < OUTPUTS
    output = tl.where(known, output, 0)
    line = output
    if GATED:
        line = output * 2
    left = tl.zeros([N, K], tl.float32)
    right = tl.zeros([N, K], tl.float32)
    # The scale of the norm is one number per row, so it is applied to the sums: the row is read
    # only once.
    squares = tl.zeros([K], tl.float32)
    for first in tl.range(0, SIZE, K, num_stages=STAGES):
        at = first + tl.arange(0, K)
        w = tl.load(weight + line[:, None].to(tl.int64) * SIZE + at[None, :])
        values = tl.load(x + at).to(tl.float32)
        if NORMED:
            squares += values * values
            values = values * tl.load(norm_weight + at).to(tl.float32)
        left += w.to(tl.float32) * values[None, :]
        if GATED:
            up = tl.load(weight + (line[:, None] + 1).to(tl.int64) * SIZE + at[None, :])
            right += up.to(tl.float32) * values[None, :]
    result = tl.sum(left, 1)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + epsilon)
        result = result * scale
    if SCALED:
        result = result * tl.load(scales + line)
    if GATED:
        other = tl.sum(right, 1) * scale
        if SCALED:
            other = other * tl.load(scales + line + 1)
        result = activate(result, other, 0.0, 0.0, ACTIVATION)
    if ADDED:
        result = result * factor + tl.load(residual + output, mask=known, other=0.0).to(
            tl.float32
        )
    tl.store(out + output, result, mask=known)


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    scales: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    factor: float = 1.0,
    activation: GateActivation = GateActivation.SILU,
    out: Tensor | None = None,
) -> Tensor:
    """`norm(x) @ weight.T`, then gated, or added to `residual` in place, times `factor`.

    `x` is `[1, size]`; `weight` is `[outputs, size]`, or with `gated` twice the outputs, gate
    and up interleaved. `scales` are those of the outputs of an FP8 weight. The result is in
    `out` if it is given.
    """
    size = x.shape[1]
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    norm_weight, epsilon = norm or (x, 0.0)
    n, k, stages = _shape(
        size,
        outputs,
        is_normed=norm is not None,
        is_gated=gated,
        is_fp8=scales is not None,
    )
    early = starts_early(x)
    slab = (2 * n if gated else n) * size * weight.element_size()
    _gemv[(triton.cdiv(outputs, n),)](
        x,
        weight,
        weight if scales is None else scales,
        norm_weight,
        x if residual is None else residual,
        out,
        epsilon,
        factor,
        SIZE=size,
        OUTPUTS=outputs,
        N=n,
        K=k,
        NORMED=norm is not None,
        GATED=gated,
        ADDED=residual is not None,
        SCALED=scales is not None,
        ACTIVATION=int(activation),
        STAGES=stages,
        EARLY=early,
        REQUESTED=slab if outputs % n == 0 and slab % REQUEST_UNIT == 0 else 0,
        num_warps=4,
        launch_pdl=early,
    )
    return out


def _shape(
    size: int, outputs: int, *, is_normed: bool, is_gated: bool, is_fp8: bool
) -> tuple[int, int, int]:
    """Outputs and inputs of a tile, and iterations read ahead; the fastest of 13 on an H200."""
    if is_fp8:
        shape = FP8_SHAPES[is_gated, is_normed]
    elif is_gated:
        shape = 4, 1024, 1
    elif outputs >= 1 << 16 or outputs <= _FEW_OUTPUTS:
        shape = 2, 1024, 1
    else:
        shape = (16, 256, 4) if is_normed else (8, 512, 4)
    n, k, stages = shape
    while size % k:
        k //= 2
    return n, k, stages


def fits(weight: Tensor, num_rows: int) -> bool:
    """Whether `gemv` supports this product."""
    return num_rows == 1 and weight.element_size() == 2 and has_whole_tiles(weight)


def has_whole_tiles(weight: Tensor) -> bool:
    """Whether the inputs of this weight, of any type, consist of whole tiles."""
    return weight.shape[1] % _UNIT == 0
