"""The part of a decoder layer after attention, where it is a gated MLP."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.device.kernels import rows
from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.gated import gate_up
from headwater.device.kernels.gemv import fits, gemv

MAX_GEMM_ROWS = 8192
"""Rows computed at once between attentions: cuBLAS is 15 % slower with four times as many."""


class RankSum(NamedTuple):
    """Sums partial results of ranks, in place."""

    sum: Callable[[Tensor], Tensor]
    is_first: bool
    """The residual is added on one rank only."""


class RmsNorm(NamedTuple):
    """A root-mean-square norm."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseMLP:
    """`down(activation(gate(x)) * up(x))`."""

    gate_up: Tensor
    """`[2 * inner, size]`: rows of gate and up in turn."""

    down: Tensor
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
    """Add the MLP's result to `hidden`, in place.

    `norm` is that of its input, `output_norm` that of its result, which is multiplied by `scale`
    otherwise. `is_eager` says that this is no part of a graph: each launch takes host time.
    """
    if fits(mlp.gate_up, len(hidden)) and fits(mlp.down, len(hidden)):
        narrow = gemv(hidden, mlp.gate_up, norm=norm, gated=True, activation=mlp.activation)
        add_linear(hidden, narrow, mlp.down, None, output_norm, scale, ranks)
        return
    for part in hidden.split(MAX_GEMM_ROWS):
        normed = part if norm is None else rows.norm(part, *norm)
        narrow = gate_up(normed, mlp.gate_up, is_eager=is_eager, activation=mlp.activation)
        add_linear(part, narrow, mlp.down, None, output_norm, scale, ranks)


def dense(mlp: DenseMLP, normed: Tensor, *, is_eager: bool) -> Tensor:
    """The MLP's result for rows that are normed already."""
    narrow = gate_up(normed, mlp.gate_up, is_eager=is_eager, activation=mlp.activation)
    return torch.mm(narrow, mlp.down.T)


def add_linear(
    hidden: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: RmsNorm | None,
    scale: float,
    ranks: RankSum | None = None,
) -> None:
    """Add `x @ weight.T` to `hidden` in place: normed if `norm` is given, else times `scale`.

    With `ranks`, each has a part of the inputs, and the sum of all parts is added.
    """
    if norm is not None:
        result = gemv(x, weight) if fits(weight, len(x)) else torch.mm(x, weight.T)
        if bias is not None:
            result += bias
        if ranks is not None:
            result = ranks.sum(result)
        rows.add_normed(result, *norm, hidden)
        return
    if ranks is not None and not ranks.is_first:
        hidden.zero_()
    if fits(weight, len(x)):
        gemv(x, weight, residual=hidden, factor=scale)
    else:
        hidden.addmm_(x, weight.T, alpha=scale)
    if bias is not None:
        hidden.add_(bias, alpha=scale)
    if ranks is not None:
        ranks.sum(hidden)
