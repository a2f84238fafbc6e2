"""The part of a decoder layer after attention, for an MLP with or without a gate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.device.gpu import fp8_blocks
from headwater.device.gpu.quantized import QuantizedWeight, Weight
from headwater.device.kernels import quantized as kernels
from headwater.device.kernels import rows
from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.gated import gate_up
from headwater.device.kernels.gemv import fits, gemv
from headwater.device.kernels.quantized import Code

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


class LayerNorm(NamedTuple):
    """A norm that also subtracts the mean."""

    weight: Tensor | None
    bias: Tensor | None
    epsilon: float


Norm = RmsNorm | LayerNorm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseMLP:
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate."""

    up: Weight
    """`[inner, size]`; with a gate `[2 * inner, size]`, interleaved rows of gate and up, unless a
    quantised weight has them in halves."""

    down: Weight
    activation: GateActivation
    is_gated: bool = True
    up_bias: Tensor | None = None
    """Only without a gate."""

    down_bias: Tensor | None = None


def add_dense(
    mlp: DenseMLP,
    hidden: Tensor,
    *,
    norm: Norm | None,
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
    is_plain = output_norm is None and mlp.down_bias is None and ranks is None
    for part in hidden.split(MAX_GEMM_ROWS):
        if is_plain and _add_in_fp8(mlp, part, norm, scale):
            continue
        narrow = activated(mlp, part, norm, is_eager=is_eager)
        add_linear(part, narrow, mlp.down, mlp.down_bias, output_norm, scale, ranks)


def _add_in_fp8(mlp: DenseMLP, hidden: Tensor, norm: Norm | None, scale: float) -> bool:
    """Add the result of the MLP, times `scale`, to `hidden` in place. Gated rows are quantised
    where they are computed. False if its weights do not take such rows."""
    up, down = mlp.up, mlp.down
    if not (
        mlp.is_gated and isinstance(up, QuantizedWeight) and isinstance(down, QuantizedWeight)
    ):
        return False
    if not (up.takes_codes(hidden) and down.takes_codes(hidden)):
        return False
    by_row = down.code is Code.FP8_ROW
    codes, scales = kernels.quantize_gated(
        up.product(*_centred(hidden, norm)),
        mlp.activation,
        len(hidden) if by_row else fp8_blocks.padded(len(hidden)),
        by_row=by_row,
        in_halves=up.in_halves,
    )
    hidden.add_(down.of_codes(codes, scales, hidden), alpha=scale)
    return True


def dense(mlp: DenseMLP, normed: Tensor, *, is_eager: bool) -> Tensor:
    """The result of the MLP, which has no biases, for rows that are already normalised."""
    return product(activated(mlp, normed, None, is_eager=is_eager), mlp.down)


def activated(mlp: DenseMLP, x: Tensor, norm: Norm | None, *, is_eager: bool) -> Tensor:
    """The input of the last product, `activation(gate(norm(x))) * up(norm(x))` with a gate."""
    weight = mlp.up
    if not mlp.is_gated:
        return rows.activate_rows(product(x, weight, norm), mlp.up_bias, mlp.activation)
    x, norm = _centred(x, norm)
    if isinstance(weight, QuantizedWeight):
        result = weight.gated(x, norm, mlp.activation)
        if result is not None:
            return result
        weight = weight.plain(x.dtype)
    if fits(weight, len(x)):
        return gemv(x, weight, norm=norm, gated=True, activation=mlp.activation)
    return gate_up(normed(x, norm), weight, is_eager=is_eager, activation=mlp.activation)


def normed(x: Tensor, norm: Norm | None, added: Tensor | None = None) -> Tensor:
    """`norm(x)`, or `x` without a norm. Before that, `added` is added to each row, in place."""
    if added is not None and not isinstance(norm, RmsNorm):
        x += added
        added = None
    x, norm = _centred(x, norm)
    return x if norm is None else rows.norm(x, *norm, added)


def product(
    x: Tensor,
    weight: Weight,
    norm: Norm | None = None,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`norm(x) @ weight.T` plus `bias`, in `out` if it is given."""
    x, norm = _centred(x, norm)
    if isinstance(weight, QuantizedWeight):
        result = weight.product(x, norm)
        result = result if out is None else out.copy_(result)
        return result if bias is None else result.add_(bias)
    if fits(weight, len(x)):
        return gemv(x, weight, bias=bias, norm=norm, out=out)
    if bias is not None:
        return torch.addmm(bias, normed(x, norm), weight.T, out=out)
    return torch.mm(normed(x, norm), weight.T, out=out)


def _centred(x: Tensor, norm: Norm | None) -> tuple[Tensor, RmsNorm | None]:
    """A layer norm is computed before a product. A root-mean-square norm is left to the product,
    which may compute it inside."""
    if not isinstance(norm, LayerNorm):
        return x, norm
    return torch.layer_norm(x, x.shape[-1:], *norm), None


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
        gemv(x, weight, bias=bias, residual=hidden, factor=scale)
        bias = None
    else:
        hidden.addmm_(x, weight.T, alpha=scale)
    if bias is not None:
        hidden.add_(bias, alpha=scale)
    if ranks is not None:
        ranks.sum(hidden)
