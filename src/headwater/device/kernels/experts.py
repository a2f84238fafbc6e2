"""The weights of all experts of a layer, as the kernels read them.

`expert_pairs` multiplies few rows with them, `expert_groups` many; `mx_experts` and `mx_prompts` do
so with weights in MXFP4.
"""

from dataclasses import dataclass

from torch import Tensor

from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.quantized import Code

SCALE_BLOCK = 128
"""Outputs and inputs that share a scale, if weights in FP8 have one for each block."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """Weights of all experts of a layer."""

    gate_up: Tensor
    """`[experts, 2 * inner, size]`: rows of gate, then of up, or both interleaved."""

    down: Tensor
    """`[experts, size, inner]`."""

    code: Code | None = None
    """How weights are stored, if they are quantised: MXFP4, or FP8 by row or by block."""

    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    """Of MXFP4, exponents for each 32 inputs; `mx_experts` uses them. Of FP8, `[experts, lines]`,
    or `[experts, parts, blocks of outputs, blocks of inputs]`, float32; gate and up are two
    parts."""

    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    is_interleaved: bool = False
    """Whether rows of gate and up are interleaved."""

    activation: GateActivation = GateActivation.SILU
    alpha: float = 1.702
    limit: float = 7.0
    """Parameters of the clamped activation."""

    @property
    def is_mxfp4(self) -> bool:
        return self.code is Code.MXFP4

    @property
    def scaling(self) -> int:
        """What has a scale in FP8: 1 for each line, 2 for each block; 0 for other weights."""
        if self.code is Code.FP8_ROW:
            return 1
        return 2 if self.code is Code.FP8_GROUP else 0

    @property
    def inner(self) -> int:
        """Number of outputs of the gate projection."""
        return self.gate_up.shape[1] // 2

    def part(self, *, is_gated: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weight, scales and bias of gate and up if `is_gated`, otherwise of down."""
        if is_gated:
            return self.gate_up, self.gate_up_scales, self.gate_up_bias
        return self.down, self.down_scales, self.down_bias
