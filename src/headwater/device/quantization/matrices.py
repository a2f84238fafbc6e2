"""A quantised weight in memory, independent of its file format.

Both kinds are `[outputs, inputs]` like the weight of `nn.Linear`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_UNSIGNED_ZERO = 8
"""The 4-bit code for zero in a group without a zero point of its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Matrix:
    """e4m3 elements with a scale for each block of them: the tensor, a row, or 128 x 128."""

    codes: Tensor
    """`[outputs, inputs]`, float8_e4m3fn."""

    scales: Tensor
    """`[blocks of outputs, blocks of inputs]`, float32."""

    block: tuple[int, int]
    """Outputs and inputs of a block."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def to(self, device: torch.device) -> "Fp8Matrix":
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weight, rounded to `dtype` once."""
        outputs, inputs = self.codes.shape
        scales = self.scales.repeat_interleave(self.block[0], 0)[:outputs]
        scales = scales.repeat_interleave(self.block[1], 1)[:, :inputs]
        return (self.codes.float() * scales).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int4Matrix:
    """4-bit codes in groups of inputs: `(code - zero) * scale`."""

    codes: Tensor
    """`[outputs, inputs]`, uint8 from 0 to 15."""

    scales: Tensor
    """`[outputs, groups]`, float32."""

    zeros: Tensor | None
    """`[outputs, groups]`, uint8; None means 8 everywhere."""

    groups: Tensor | None = None
    """Group of each input, if groups are not in order (activation order)."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def to(self, device: torch.device) -> "Int4Matrix":
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weight, rounded to `dtype` once."""
        group_of = self.groups
        if group_of is None:
            group_of = torch.arange(self.codes.shape[1], device=self.codes.device)
            group_of = group_of // self.group_size
        zeros: Tensor | int = _UNSIGNED_ZERO
        if self.zeros is not None:
            zeros = self.zeros.int()[:, group_of]
        return ((self.codes.int() - zeros) * self.scales[:, group_of]).to(dtype)


QuantizedMatrix = Fp8Matrix | Int4Matrix
