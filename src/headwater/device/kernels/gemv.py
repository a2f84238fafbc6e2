"""Products of one row with a large weight, which is read once at memory speed.

With one sequence, the time of a step is that of reading the weights. The norm before a product
and the gate or residual after it are fused, so they need no separate pass or launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import GateActivation, activate
from headwater.device.kernels.early import lets_next_start, start_early, starts_early

_FEW_OUTPUTS = 512
"""Maximum number of outputs of a router. Its tiles have two outputs, so that every processor
has work."""

_MANY_OUTPUTS = 1 << 16
"""Minimum number of outputs of an output layer."""

_NARROW = 2048
"""Inputs of two iterations of the largest tile."""

_UNIT = 64
"""The number of inputs is a multiple of this, so that lines are aligned."""

_WHOLE = 256
"""A number of inputs that is a multiple of this is divided into whole tiles; any other has an
incomplete last tile."""

FP8_SHAPES = {
    (True, True): (16, 256, 4),
    (True, False): (16, 256, 4),
    (False, True): (16, 512, 3),
    (False, False): (8, 512, 4),
}
"""Tile shapes for FP8 weights, by whether the product is gated and normalised: the fastest of 7
on an H200."""


@triton.jit
def _inputs(place, at, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Elements at `place + at`; 0 after the end of a line."""
    return tl.load(place + at) if WHOLE else tl.load(place + at, mask=at < SIZE, other=0.0)


@triton.jit
def _gemv(
    x,
    weight,
    scales,
    bias,
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
    BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    NEXT: tl.constexpr,
):
    whole: tl.constexpr = SIZE % K == 0
    output = tl.program_id(0) * N + tl.arange(0, N)
    known = output < OUTPUTS
    output = tl.where(known, output, 0)
    line = output
    if GATED:
        line = output * 2
    lines_at = weight + line[:, None].to(tl.int64) * SIZE
    if STAGES == 0:
        # Weights are read one tile ahead, and the first before `start_early`: no kernel writes
        # weights, so they come while the kernel before still runs.
        begin = tl.arange(0, K)[None, :]
        next_w = _inputs(lines_at, begin, SIZE, K <= SIZE)
        if GATED:
            next_up = _inputs(lines_at + SIZE, begin, SIZE, K <= SIZE)
    start_early(EARLY, NEXT)
    left = tl.zeros([N, K], tl.float32)
    right = tl.zeros([N, K], tl.float32)
    # The scale of the norm is one number per row, so it is applied to the sums: the row is read
    # only once.
    squares = tl.zeros([K], tl.float32)
    for first in tl.range(0, SIZE, K, num_stages=STAGES if STAGES > 0 else 1):
        at = first + tl.arange(0, K)
        if STAGES == 0:
            w = next_w
            next_w = _inputs(lines_at, (at + K)[None, :], SIZE, False)
        else:
            w = _inputs(lines_at, at[None, :], SIZE, whole)
        values = _inputs(x, at, SIZE, whole).to(tl.float32)
        if NORMED:
            squares += values * values
            values = values * _inputs(norm_weight, at, SIZE, whole).to(tl.float32)
        left += w.to(tl.float32) * values[None, :]
        if GATED:
            if STAGES == 0:
                up = next_up
                next_up = _inputs(lines_at + SIZE, (at + K)[None, :], SIZE, False)
            else:
                up = _inputs(lines_at + SIZE, at[None, :], SIZE, whole)
            right += up.to(tl.float32) * values[None, :]
    result = tl.sum(left, 1)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + epsilon)
        result = result * scale
    if SCALED:
        result = result * tl.load(scales + line)
    if BIASED:
        result += tl.load(bias + line).to(tl.float32)
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
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    factor: float = 1.0,
    activation: GateActivation = GateActivation.SILU,
    out: Tensor | None = None,
) -> Tensor:
    """`norm(x) @ weight.T` plus `bias`; then gated, or multiplied by `factor` and added to
    `residual` in place.

    `x` is `[1, size]`; `weight` is `[outputs, size]`, or with `gated` twice the outputs, gate
    and up interleaved, and no bias. `scales` are those of the outputs of an FP8 weight. The
    result is in `out` if it is given.
    """
    assert bias is None or not gated, "a gated product has no bias"
    size = x.shape[1]
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    norm_weight, epsilon = norm or (x, 0.0)
    early = starts_early(x)
    n, k, stages = _shape(
        size,
        outputs,
        is_normed=norm is not None,
        is_gated=gated,
        is_fp8=scales is not None,
        is_early=early,
    )
    _gemv[(triton.cdiv(outputs, n),)](
        x,
        weight,
        weight if scales is None else scales,
        weight if bias is None else bias,
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
        BIASED=bias is not None,
        ACTIVATION=int(activation),
        STAGES=stages,
        EARLY=early,
        NEXT=lets_next_start(x),
        num_warps=4,
        launch_pdl=early,
    )
    return out


def _shape(
    size: int, outputs: int, *, is_normed: bool, is_gated: bool, is_fp8: bool, is_early: bool
) -> tuple[int, int, int]:
    """Outputs and inputs of a tile, and iterations read ahead; the fastest of 13 on an H200.

    A kernel that starts early has small tiles: its programs start on processors where others
    have ended, so a few large programs would be spread unevenly.
    """
    if size % _WHOLE and not is_fp8 and not is_gated:
        n, k, stages = (1, 1024, 1) if outputs <= _FEW_OUTPUTS else (16, 256, 4)
        return n, min(k, triton.next_power_of_2(size)), stages
    if is_fp8:
        shape = FP8_SHAPES[is_gated, is_normed]
    elif is_gated and is_early:
        shape = (2 if size <= _NARROW else 4, 1024, 1) if size % 1024 == 0 else (8, 256, 0)
    elif is_gated:
        shape = 4, 1024, 1
    elif outputs <= _FEW_OUTPUTS or (outputs >= _MANY_OUTPUTS and size % _NARROW == 0):
        shape = 2, 1024, 1
    elif outputs >= _MANY_OUTPUTS:
        shape = 8, 512, 4
    elif is_early:
        shape = (4, 1024, 0) if size % 512 == 0 else (8, 256, 0)
    else:
        shape = (16, 256, 4) if is_normed else (8, 512, 4)
    n, k, stages = shape
    if size % _WHOLE:
        return n, min(k, triton.next_power_of_2(size)), stages
    while size % k:
        k //= 2
    return n, k, stages


def fits(weight: Tensor, num_rows: int) -> bool:
    """Whether `gemv` supports this product."""
    return num_rows == 1 and weight.element_size() == 2 and has_aligned_lines(weight)


def has_aligned_lines(weight: Tensor) -> bool:
    """Whether `gemv` supports the number of inputs of this weight, of any type."""
    return weight.shape[1] % _UNIT == 0
