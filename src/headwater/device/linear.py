"""Matrix products fused with the following operation: activation, gate or residual.

There are three forms with the same methods. `TiledLinear` uses the compiled products of `gemm`.
Without a compiler, large weights are packed in oneDNN's order, and small ones are plain: for them
a packed call costs more than it saves.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.device.gemm import PLUS, SILU, TIMES, Gemm, load_gemm
from headwater.device.host_ops import host_ops

MIN_PACKED_WEIGHTS = 1 << 18
"""A packed product costs about 15 µs per call; below this size that is not worth it."""

_ROWS_HINT = 16


class TiledLinear(nn.Module):
    """A linear layer whose weight is kept in the panels of `gemm.c`."""

    def __init__(self, gemm: Gemm, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._gemm = gemm
        self._width = len(weight)
        self.packed = gemm.pack(weight)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return self._gemm.multiply(x, self.packed, self.bias, self._width)

    def activated(self, x: Tensor, activation: str, variant: str) -> Tensor:
        """`activation(linear(x))`."""
        if activation == "swish":
            return self._gemm.multiply(x, self.packed, self.bias, self._width, SILU)
        return F.gelu(self.forward(x), approximate=variant)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """`linear(x) * other`."""
        return self._gemm.multiply(x, self.packed, self.bias, self._width, TIMES, other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """`linear(x) + other`."""
        return self._gemm.multiply(x, self.packed, self.bias, self._width, PLUS, other)


class PackedLinear(nn.Module):
    """A linear layer whose weight is kept in oneDNN's own order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(x, "none", "")

    def activated(self, x: Tensor, activation: str, variant: str) -> Tensor:
        """`activation(linear(x))`."""
        fused = torch.ops.mkldnn._linear_pointwise.default
        return cast(Tensor, fused(x, self.packed, self.bias, activation, [], variant))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """`linear(x) * other`."""
        fused = torch.ops.mkldnn._linear_pointwise.binary
        return cast(Tensor, fused(x, other, self.packed, self.bias, "mul"))

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """`linear(x) + other`."""
        fused = torch.ops.mkldnn._linear_pointwise.binary
        return cast(Tensor, fused(x, other, self.packed, self.bias, "add"))


class PlainLinear(nn.Module):
    """A small linear layer, with the methods of a packed one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def activated(self, x: Tensor, activation: str, variant: str) -> Tensor:
        """`activation(linear(x))`."""
        out = F.linear(x, self.weight, self.bias)
        return F.silu(out) if activation == "swish" else F.gelu(out, approximate=variant)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """`linear(x) * other`."""
        return F.linear(x, self.weight, self.bias) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """`linear(x) + other`."""
        return F.linear(x, self.weight, self.bias) + other


AnyLinear = TiledLinear | PackedLinear | PlainLinear


def make_linear(
    weight: Tensor, bias: Tensor | None, *, min_packed_weights: int = MIN_PACKED_WEIGHTS
) -> AnyLinear:
    """The fastest form for a weight of this size on this machine."""
    gemm = load_gemm()
    if gemm is not None:
        return TiledLinear(gemm, weight, bias)
    kind = PackedLinear if weight.numel() >= min_packed_weights else PlainLinear
    return kind(weight, bias)


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(
        self, gate: AnyLinear, up: AnyLinear, down: AnyLinear, activation: nn.Module
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self.activation, self.variant = ACTIVATIONS[type(activation).__name__]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.gated(x)))

    def gated(self, x: Tensor) -> Tensor:
        """Everything except the last product."""
        return self.up.times(x, self.gate.activated(x, self.activation, self.variant))


ACTIVATIONS = {
    "GELUTanh": ("gelu", "tanh"),
    "SiLU": ("swish", "none"),
    "SiLUActivation": ("swish", "none"),
}
"""Activations of oneDNN: its name and variant for each class."""


class FusedNorm(nn.Module):
    """Root-mean-square norm as one operation."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = weight.contiguous()
        self.epsilon = epsilon
        self._ops = host_ops(weight.device, weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.epsilon)


def can_pack() -> bool:
    """Whether products are compiled, or this build of torch has oneDNN's packed products and
    their results are right."""
    if load_gemm() is not None:
        return True
    torch_linear = nn.Linear(32, 48)
    x = torch.randn(5, 32)
    try:
        packed = PackedLinear(torch_linear.weight, torch_linear.bias)
        return agree(packed(x), torch_linear(x))
    except (RuntimeError, AttributeError):
        return False


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results are equal except for the order of additions."""
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
