"""Kernels over rows of activations: embedding, root-mean-square norm, activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.activation import GateActivation, activate
from headwater.device.kernels.early import start_early, starts_early


@triton.jit
def _embed(tokens, carry, chosen, table, out, scale, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
           SCALED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0)
    token = tl.load(tokens + row).to(tl.int64)
    source = tl.load(carry + row)
    if source >= 0:
        token = tl.load(chosen + source).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    values = tl.load(table + token * HIDDEN + at, mask=inside)
    if SCALED:
        values = values.to(tl.float32) * scale
    tl.store(out + row.to(tl.int64) * HIDDEN + at, values, mask=inside)


def embed(
    tokens: Tensor, carry: Tensor, chosen: Tensor, table: Tensor, scale: float = 1.0
) -> Tensor:
    """Rows of `table` for `tokens`, times `scale`. A token whose `carry` is not -1 is that
    entry of `chosen`."""
    hidden = table.shape[1]
    out = torch.empty((len(tokens), hidden), dtype=table.dtype, device=table.device)
    block = triton.next_power_of_2(hidden)
    early = starts_early(tokens)
    # The first kernel of a step is launched as usual, so that it sees what was sent for the step.
    _embed[(len(tokens),)](
        tokens, carry, chosen, table, out, scale, HIDDEN=hidden, BLOCK=block,
        SCALED=scale != 1.0, EARLY=early,
    )  # fmt: skip
    return out


@triton.jit
def _norm(x, added, weight, out, epsilon, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
          ADDED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        values += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    if ADDED:
        tl.debug_barrier()  # several threads read an element of a short row, and one writes it
        tl.store(x + row * stride + at, values, mask=inside)
    weights = tl.load(weight + at, mask=inside).to(tl.float32)
    tl.store(out + row * stride + at, values * scale * weights, mask=inside)


def norm(x: Tensor, weight: Tensor, epsilon: float, added: Tensor | None = None) -> Tensor:
    """Root-mean-square norm of each row of `x`, `[rows, size]`. First `added` is added to each
    row, in place."""
    out = torch.empty_like(x)
    _launch_norm(x, weight, epsilon, out, added)
    return out


def norm_columns(x: Tensor, weight: Tensor, epsilon: float) -> None:
    """Apply `norm` in place, to an `x` that consists of some columns of a wider tensor."""
    _launch_norm(x, weight, epsilon, x)


def _launch_norm(
    x: Tensor, weight: Tensor, epsilon: float, out: Tensor, added: Tensor | None = None
) -> None:
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    warps = 4 if block <= 2048 else 8
    early = starts_early(x)
    _norm[(len(x),)](
        x, x if added is None else added, weight, out, epsilon, x.stride(0), SIZE=size,
        BLOCK=block, ADDED=added is not None, EARLY=early,
        num_warps=warps, launch_pdl=early,
    )  # fmt: skip


@triton.jit
def _add_normed(x, weight, hidden, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    values = tl.load(x + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    weights = tl.load(weight + at, mask=inside).to(tl.float32)
    place = hidden + row * SIZE + at
    residual = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, residual + values * scale * weights, mask=inside)


def add_normed(x: Tensor, weight: Tensor, epsilon: float, hidden: Tensor) -> None:
    """Add the root-mean-square norm of each row of `x` to `hidden`, in place."""
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    warps = 4 if block <= 2048 else 8
    early = starts_early(x)
    _add_normed[(len(x),)](
        x, weight, hidden, epsilon, SIZE=size, BLOCK=block, EARLY=early, num_warps=warps,
        launch_pdl=early,
    )  # fmt: skip


@triton.jit
def gated_values(x, row, first, SIZE: tl.constexpr, BLOCK: tl.constexpr,  # noqa: ANN201
                 ACTIVATION: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    """`activation(gate) * up` of `BLOCK` elements of a row from `first` on, as float32; 0 after
    its end."""
    if HALVES:
        at = first + tl.arange(0, BLOCK)
        place = x + row * 2 * SIZE + at
        gate = tl.load(place, mask=at < SIZE, other=0.0).to(tl.float32)
        up = tl.load(place + SIZE, mask=at < SIZE, other=0.0).to(tl.float32)
    else:
        both_at = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.load(x + row * 2 * SIZE + both_at, mask=both_at < 2 * SIZE, other=0.0)
        gate, up = tl.split(tl.reshape(both.to(tl.float32), (BLOCK, 2)))
    return activate(gate, up, 0.0, 0.0, ACTIVATION)


@triton.jit
def _gate(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
          HALVES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    result = gated_values(x, row, first, SIZE, BLOCK, ACTIVATION, HALVES)
    at = first + tl.arange(0, BLOCK)
    tl.store(out + row * SIZE + at, result, mask=at < SIZE)


def gate(
    x: Tensor, activation: GateActivation = GateActivation.SILU, *, in_halves: bool = False
) -> Tensor:
    """`activation(gate) * up` of each row, whose elements are gate and up interleaved, or all of
    gate, then all of up."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(size), 1024)
    _gate[(rows, triton.cdiv(size, block))](
        x, out, SIZE=size, BLOCK=block, ACTIVATION=int(activation), HALVES=in_halves,
    )  # fmt: skip
    return out


@triton.jit
def _activate_rows(x, bias, SIZE: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr,
                   ACTIVATION: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    values = tl.load(x + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        values += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    result = activate(values, 1.0, 0.0, 0.0, ACTIVATION)
    tl.store(x + row * SIZE + at, result, mask=inside)


def activate_rows(x: Tensor, bias: Tensor | None, activation: GateActivation) -> Tensor:
    """`activation(x + bias)`, in the memory of `x`."""
    num_rows, size = x.shape
    block = min(triton.next_power_of_2(size), 1024)
    early = starts_early(x)
    _activate_rows[(num_rows, triton.cdiv(size, block))](
        x, x if bias is None else bias, SIZE=size, BLOCK=block, BIASED=bias is not None,
        ACTIVATION=int(activation), EARLY=early, launch_pdl=early,
    )  # fmt: skip
    return x
