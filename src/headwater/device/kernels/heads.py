"""Products of each head of a few rows with the head's own weight, `[heads, inputs, outputs]`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.latent_store import rotate_queries, rotate_rows
from headwater.device.kernels.rotary import RotaryPairs

MAX_HEAD_ROWS = 4
"""Maximum number of rows for which these kernels are used: each row reads the weight again,
from the cache."""

_OUTPUTS = 32
"""Outputs of a program."""


@triton.jit
def _head_product(x, place, out, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, N: tl.constexpr,
                  K: tl.constexpr, BY_INPUT: tl.constexpr, BY_OUTPUT: tl.constexpr):  # fmt: skip
    """Compute one program's outputs of one head of a row."""
    number = tl.program_id(1) * N + tl.arange(0, N)
    at = tl.arange(0, K)
    inside = (number < OUTPUTS)[:, None] & (at < INPUTS)[None, :]
    place = place + number[:, None] * BY_OUTPUT + at[None, :] * BY_INPUT
    w = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + at, mask=at < INPUTS, other=0.0).to(tl.float32)
    tl.store(out + number, tl.sum(w * values[None, :], 1), mask=number < OUTPUTS)


@triton.jit
def _product(x, weight, out, x_stride, x_head, out_stride, out_head,
             HEAD: tl.constexpr, BY_INPUT: tl.constexpr, BY_OUTPUT: tl.constexpr,
             INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    head = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    _head_product(
        x + row * x_stride + head * x_head, weight + head * HEAD,
        out + row * out_stride + head * out_head, INPUTS, OUTPUTS, N, K, BY_INPUT, BY_OUTPUT,
    )  # fmt: skip


@triton.jit
def _absorb(packed, weight, positions, cosines, sines, query, packed_stride,
            HEAD: tl.constexpr, BY_INPUT: tl.constexpr, BY_OUTPUT: tl.constexpr,
            HEADS: tl.constexpr, PLAIN: tl.constexpr, LATENT: tl.constexpr,
            ROTATED: tl.constexpr, ROTATED_WIDTH: tl.constexpr, PAIRS: tl.constexpr,
            N: tl.constexpr, K: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    head = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    x = packed + row * packed_stride + head * (PLAIN + ROTATED)
    out = query + (row * HEADS + head) * (LATENT + ROTATED)
    if tl.program_id(1) * N < LATENT:
        _head_product(x, weight + head * HEAD, out, PLAIN, LATENT, N, K, BY_INPUT, BY_OUTPUT)
    else:  # the last program of a head
        one = tl.zeros([1], tl.int64)
        rotate_rows(
            x + PLAIN + one, out + LATENT + one, cosines, sines, tl.load(positions + row),
            one == 0, ROTATED // 2, ROTATED_WIDTH, PAIRS,
        )  # fmt: skip


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


def absorb(
    packed: Tensor,
    weight: Tensor,
    positions: Tensor,
    table: tuple[Tensor, Tensor],
    query: Tensor,
    pairs: RotaryPairs,
) -> None:
    """Absorbed queries of latent attention, `[rows, heads, latent + rotated]`, in one kernel
    for few rows. They come from queries `[rows, heads * (plain + rotated)]`, whose rows may be
    strided."""
    heads, plain, latent = weight.shape
    rotated = 2 * table[0].shape[1]
    if len(packed) > MAX_HEAD_ROWS:
        own = packed.view(len(packed), heads, -1)[..., :plain]
        by_head(own, weight, query[..., :latent])
        rotate_queries(packed, positions, table, query, pairs)
        return
    early = starts_early(packed)
    outputs = min(_OUTPUTS, triton.next_power_of_2(latent))
    _absorb[(heads, triton.cdiv(latent, outputs) + 1, len(packed))](
        packed, weight, positions, *table, query, packed.stride(0),
        HEAD=weight.stride(0), BY_INPUT=weight.stride(1), BY_OUTPUT=weight.stride(2),
        HEADS=heads, PLAIN=plain, LATENT=latent, ROTATED=rotated,
        ROTATED_WIDTH=triton.next_power_of_2(rotated // 2), PAIRS=int(pairs), N=outputs,
        K=triton.next_power_of_2(plain), EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
