"""The part of a decoder layer after attention, for a gated MLP."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.device.gpu.quantized import QuantizedWeight, Weight
from headwater.device.kernels import rows
from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.gated import gate_up
from headwater.device.kernels.gemv import fits, gemv

MAX_GEMM_ROWS = 8192
"""Rows computed at once between attentions; cuBLAS is 15 % slower with four times as many."""


class RankSum(NamedTuple):
    """Sums partial results of ranks in place."""

    sum: Callable[[Tensor], Tensor]
    is_first: bool
    """Whether this rank adds the residual; only one does."""


class RmsNorm(NamedTuple):
    """A root-mean-square norm."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseMLP:
    """`down(activation(gate(x)) * up(x))`."""

    gate_up: Weight
    """`[2 * inner, size]`: interleaved rows of gate and up."""

    down: Weight
    activation: GateActivation


def add_dense(
    mlp: DenseMLP,
    hidden: Tensor,
    *,
    norm: RmsNorm | None,
    output_norm: RmsNorm | None,
    scale: float,
    is_eager: bool,
    ranks: RankSum | None = None,
) -> None:
    """Add the result of the MLP to `hidden`, in place.

    `norm` is applied to the input of the MLP, `output_norm` to its result; without
    `output_norm` the result is multiplied by `scale`. `is_eager` means that this is not part of
    a graph, so each launch takes host time.
    """
    for part in hidden.split(MAX_GEMM_ROWS):
        narrow = gated(mlp, part, norm, is_eager=is_eager)
        add_linear(part, narrow, mlp.down, None, output_norm, scale, ranks)


def dense(mlp: DenseMLP, normed: Tensor, *, is_eager: bool) -> Tensor:
    """The result of the MLP for rows that are already normalised."""
    return product(gated(mlp, normed, None, is_eager=is_eager), mlp.down)


def gated(mlp: DenseMLP, x: Tensor, norm: RmsNorm | None, *, is_eager: bool) -> Tensor:
    """`activation(gate(norm(x))) * up(norm(x))`."""
    weight = mlp.gate_up
    if isinstance(weight, QuantizedWeight):
        result = weight.gated(x, norm, mlp.activation)
        if result is not None:
            return result
        weight = weight.plain(x.dtype)
    if fits(weight, len(x)):
        return gemv(x, weight, norm=norm, gated=True, activation=mlp.activation)
    normed = x if norm is None else rows.norm(x, *norm)
    return gate_up(normed, weight, is_eager=is_eager, activation=mlp.activation)


def product(
    x: Tensor, weight: Weight, norm: RmsNorm | None = None, out: Tensor | None = None
) -> Tensor:
    """`norm(x) @ weight.T`, in `out` if it is given."""
    if isinstance(weight, QuantizedWeight):
        result = weight.product(x, norm)
        return result if out is None else out.copy_(result)
    if fits(weight, len(x)):
        return gemv(x, weight, norm=norm, out=out)
    normed = x if norm is None else rows.norm(x, *norm)
    return torch.mm(normed, weight.T, out=out)


def add_linear(
    hidden: Tensor,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    norm: RmsNorm | None,
    scale: float,
    ranks: RankSum | None = None,
) -> None:
    """Add `x @ weight.T` to `hidden` in place: normalised if `norm` is given, otherwise
    multiplied by `scale`. With `ranks`, each rank has a part of the inputs, and the sum of
    their results is added."""
    if norm is not None:
        result = product(x, weight)
        if bias is not None:
            result += bias
        if ranks is not None:
            result = ranks.sum(result)
        rows.add_normed(result, *norm, hidden)
        return
    if ranks is not None and not ranks.is_first:
        hidden.zero_()
    if isinstance(weight, QuantizedWeight):
        weight.add_to(hidden, x, scale)
    elif fits(weight, len(x)):
        gemv(x, weight, residual=hidden, factor=scale)
    else:
        hidden.addmm_(x, weight.T, alpha=scale)
    if bias is not None:
        hidden.add_(bias, alpha=scale)
    if ranks is not None:
        ranks.sum(hidden)
