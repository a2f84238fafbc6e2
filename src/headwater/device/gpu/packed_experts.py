"""Experts on the GPU in their published format; they are never dequantised as a whole. Those of
GPT-OSS are in MXFP4.

In MXFP4 as it is published, a group of 32 inputs is 16 bytes: byte i has inputs 2 i (low bits)
and 2 i + 1. The kernels need them in quarters, as `unpack` describes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.device.gpu.quantized import packed_quarters
from headwater.device.kernels.quantized import Code, dequantize

_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeight:
    """One weight of all experts, in the kernels' order."""

    codes: Tensor
    """`[experts, outputs, inputs / 2]` bytes."""

    scales: Tensor
    """`[experts, outputs, inputs / 32]` exponents."""

    def plain(self, expert: Tensor | int, dtype: torch.dtype) -> Tensor:
        """The weight of one expert, `[inputs, outputs]`, as transformers' code needs it."""
        codes = self.codes[expert]
        whole = dequantize(
            codes, self.scales[expert], None, code=Code.MXFP4, group=_GROUP,
            size=2 * codes.shape[1], dtype=dtype,
        )  # fmt: skip
        return whole.T


def packed_weight(blocks: Tensor, scales: Tensor) -> PackedWeight:
    """Converts from the published order: blocks `[experts, outputs, groups, 16]`."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)
    return PackedWeight(codes=packed_quarters(codes, _GROUP), scales=scales.contiguous())


class StoredExperts(nn.Module):
    """Replaces the experts of a layer in transformers' own code. It computes one expert at a
    time. Weights keep their stored format."""

    gate_up: Any
    """Weights with `codes`, `scales`, and `plain`, which dequantises those of one expert."""

    down: Any

    @property
    def packed_bytes(self) -> int:
        """Memory of the weights, which are not parameters."""
        parts = (self.gate_up, self.down)
        return sum(part.codes.nbytes + part.scales.nbytes for part in parts)

    def compute(self, rows: Tensor, expert: int) -> Tensor:
        """The result of one expert for `rows`."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The result for rows `[tokens, size]` with the experts `chosen` and their `weights`,
        for each row."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if weights.shape[1] != chosen.shape[1]:
            weights = weights.gather(1, chosen)
        out = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            row, place = torch.where(chosen == expert)
            result = self.compute(rows[row], expert)
            out.index_add_(0, row, (result * weights[row, place, None]).to(out.dtype))
        return out.view(hidden.shape)


class PackedExperts(StoredExperts):
    """GPT-OSS's experts in MXFP4."""

    def __init__(self, plain: nn.Module, gate_up: PackedWeight, down: PackedWeight) -> None:
        super().__init__()
        parts: Any = plain
        self.gate_up, self.down = gate_up, down
        self.gate_up_proj_bias, self.down_proj_bias = (
            parts.gate_up_proj_bias,
            parts.down_proj_bias,
        )
        self.alpha, self.limit = float(parts.alpha), float(parts.limit)

    def compute(self, rows: Tensor, expert: int) -> Tensor:
        """See `StoredExperts`."""
        both = rows @ self.gate_up.plain(expert, rows.dtype) + self.gate_up_proj_bias[expert]
        gate = both[:, 0::2].clamp(max=self.limit)
        up = both[:, 1::2].clamp(-self.limit, self.limit)
        inner = (up + 1) * gate * torch.sigmoid(gate * self.alpha)
        result: Tensor = inner @ self.down.plain(expert, rows.dtype)
        result += self.down_proj_bias[expert]
        return result
