"""Kernels over rows of activations: embedding, root-mean-square norm, gated activation."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed(tokens, carry, chosen, table, out, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.load(tokens + row).to(tl.int64)
    source = tl.load(carry + row)
    if source >= 0:
        token = tl.load(chosen + source).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    values = tl.load(table + token * HIDDEN + at, mask=inside)
    tl.store(out + row.to(tl.int64) * HIDDEN + at, values, mask=inside)


def embed(tokens: Tensor, carry: Tensor, chosen: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` for `tokens`; where `carry` is not -1, for that entry of `chosen`."""
    hidden = table.shape[1]
    out = torch.empty((len(tokens), hidden), dtype=table.dtype, device=table.device)
    block = triton.next_power_of_2(hidden)
    _embed[(len(tokens),)](tokens, carry, chosen, table, out, HIDDEN=hidden, BLOCK=block)
    return out


@triton.jit
def _norm(x, weight, out, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    values = tl.load(x + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    weights = tl.load(weight + at, mask=inside).to(tl.float32)
    tl.store(out + row * SIZE + at, values * scale * weights, mask=inside)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm of each row of `x`, `[rows, size]`."""
    size = x.shape[1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    warps = 4 if block <= 2048 else 8
    _norm[(len(x),)](x, weight, out, epsilon, SIZE=size, BLOCK=block, num_warps=warps)
    return out


@triton.jit
def _gate(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    both_at = 2 * first + tl.arange(0, 2 * BLOCK)
    both = tl.load(x + row * 2 * SIZE + both_at, mask=both_at < 2 * SIZE, other=0.0)
    gate, up = tl.split(tl.reshape(both.to(tl.float32), (BLOCK, 2)))
    at = first + tl.arange(0, BLOCK)
    tl.store(out + row * SIZE + at, gate * tl.sigmoid(gate) * up, mask=at < SIZE)


def gate(x: Tensor) -> Tensor:
    """`silu(gate) * up` of each row, whose numbers are those of gate and up in turn."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(size), 1024)
    _gate[(rows, triton.cdiv(size, block))](x, out, SIZE=size, BLOCK=block)
    return out
