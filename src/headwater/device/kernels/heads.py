"""Products of each head of a few rows with the head's own weight, `[heads, inputs, outputs]`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.early import start_early, starts_early

MAX_HEAD_ROWS = 4
"""Most rows for which this is used: each reads the weight again, from the cache."""

_OUTPUTS = 32
"""Outputs of a program."""


@triton.jit
def _product(x, weight, out, x_stride, x_head, out_stride, out_head,
             HEAD: tl.constexpr, BY_INPUT: tl.constexpr, BY_OUTPUT: tl.constexpr,
             INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    head = tl.program_id(0)
    number = tl.program_id(1) * N + tl.arange(0, N)
    row = tl.program_id(2).to(tl.int64)
    at = tl.arange(0, K)
    inside = (number < OUTPUTS)[:, None] & (at < INPUTS)[None, :]
    place = weight + head * HEAD + number[:, None] * BY_OUTPUT + at[None, :] * BY_INPUT
    w = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + head * x_head + at, mask=at < INPUTS, other=0.0)
    result = tl.sum(w * values.to(tl.float32)[None, :], 1)
    tl.store(out + row * out_stride + head * out_head + number, result, mask=number < OUTPUTS)


def by_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """`out[row, head] = x[row, head] @ weight[head]`; `x` is `[rows, heads, inputs]` and `out`
    `[rows, heads, outputs]`, both with contiguous last elements."""
    if len(x) > MAX_HEAD_ROWS:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return
    heads, inputs, outputs = weight.shape
    early = starts_early(x)
    _product[(heads, triton.cdiv(outputs, _OUTPUTS), len(x))](
        x, weight, out, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        HEAD=weight.stride(0), BY_INPUT=weight.stride(1), BY_OUTPUT=weight.stride(2),
        INPUTS=inputs, OUTPUTS=outputs, N=min(_OUTPUTS, triton.next_power_of_2(outputs)),
        K=triton.next_power_of_2(inputs), EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
