"""Experts on the GPU in FP8, with a scale for each output or for each block of 128 x 128."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.device.gpu.packed_experts import StoredExperts
from headwater.device.kernels.expert_groups import add_grouped
from headwater.device.kernels.expert_pairs import MAX_PAIR_ROWS, add_pairs
from headwater.device.kernels.experts import SCALE_BLOCK, ExpertWeights
from headwater.device.kernels.quantized import Code
from headwater.device.kernels.routing import RoutingRule, choose_experts, route
from headwater.device.quantization.expert_names import ExpertLayers
from headwater.device.quantization.matrices import Fp8Matrix, QuantizedMatrix

_ALIGN = 16
"""Sizes are multiples of this, so that the loads of a row are aligned."""

_CHECKED_ROWS = (1, MAX_PAIR_ROWS)
_CHECKED_PAIRS = (1, 12.5, 24.5, 96.5)
"""Numbers of rows, and of pairs for each expert, with which every form of the products is
checked."""

_MOST_APART = 0.03, 0.1
"""Largest relative error; the second if rows are quantised too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8ExpertWeight:
    """One weight of all experts."""

    codes: Tensor
    """`[experts, outputs, inputs]`, e4m3."""

    scales: Tensor
    """`[experts, outputs]`, or `[experts, parts, blocks of outputs, blocks of inputs]`."""

    def plain(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The weight of one expert, `[outputs, inputs]`."""
        codes, scales = self.codes[expert].float(), self.scales[expert]
        if scales.dim() == 1:
            return (codes * scales[:, None]).to(dtype)
        outputs, inputs = len(codes) // len(scales), codes.shape[1]
        whole = scales.repeat_interleave(SCALE_BLOCK, 1).repeat_interleave(SCALE_BLOCK, 2)
        return (codes * whole[:, :outputs, :inputs].reshape(codes.shape)).to(dtype)


class Fp8Experts(StoredExperts):
    """Experts with gate, up and SiLU."""

    def __init__(self, gate_up: Fp8ExpertWeight, down: Fp8ExpertWeight) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.weights = ExpertWeights(
            code=Code.FP8_ROW if down.scales.dim() == 2 else Code.FP8_GROUP,
            gate_up=gate_up.codes,
            gate_up_scales=gate_up.scales,
            down=down.codes,
            down_scales=down.scales,
        )

    def compute(self, rows: Tensor, expert: int) -> Tensor:
        """See `StoredExperts`."""
        both = torch.nn.functional.linear(rows, self.gate_up.plain(expert, rows.dtype))
        gate, up = both.chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        return torch.nn.functional.linear(inner, self.down.plain(expert, rows.dtype))

    def check(self, top: int, dtype: torch.dtype) -> float:
        """The largest relative error of the kernels compared with dequantised weights, for few
        and for many rows with `top` experts each. NaN if a result is not a number."""
        experts, size, _ = self.down.codes.shape
        device = self.down.codes.device
        counts = [*_CHECKED_ROWS, *(int(experts * n / top) + 5 for n in _CHECKED_PAIRS)]
        errors = []
        for count in counts:
            rows = torch.randn(count, size, device=device).to(dtype)
            logits = torch.randn(count, experts, device=device).to(dtype)
            result = torch.zeros_like(rows)
            rule = RoutingRule(top=top, renormalise=True)
            if count <= MAX_PAIR_ROWS:
                ids, shares = choose_experts(logits, rule)
                add_pairs(rows, result, self.weights, ids, shares)
            else:
                routing = route(logits, rule)
                ids, shares = routing.ids, routing.weights
                add_grouped(rows, result, self.weights, routing)
            exact = self(rows, ids.long(), shares).float()
            errors.append((result.float() - exact).norm() / exact.norm())
        return float(torch.stack(errors).max())


def fault_of(experts: Fp8Experts, top: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot be used for rows of `dtype` with `top` experts each; None if they
    agree with dequantised weights."""
    try:
        error = experts.check(top, dtype)
    except Exception as exc:  # noqa: BLE001 - the compiler and the driver raise many kinds
        return f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
    allowed = _MOST_APART[experts.weights.code is Code.FP8_ROW and dtype != torch.float32]
    return None if error <= allowed else f"results differ by {error:.3g}"


def fp8_experts(
    layers: ExpertLayers, read: Callable[[str], QuantizedMatrix], device: torch.device
) -> Fp8Experts | None:
    """Experts on `device`, from the matrix of each layer; None if the kernels do not support
    them."""
    gate_up = _joined((layers.gate, layers.up), read, device)
    down = _joined((layers.down,), read, device)
    if gate_up is None or down is None or gate_up.scales.dim() != down.scales.dim():
        return None
    return Fp8Experts(gate_up, down)


def _joined(
    parts: Sequence[Sequence[str]],
    read: Callable[[str], QuantizedMatrix],
    device: torch.device,
) -> Fp8ExpertWeight | None:
    """One weight with all parts of an expert, one after the other."""
    first = read(parts[0][0])
    if not isinstance(first, Fp8Matrix) or not _is_supported(first):
        return None
    shape = len(parts[0]), len(parts)
    # torch copies e4m3 elements as bytes only.
    codes = torch.empty((*shape, *first.shape), dtype=torch.uint8, device=device)
    scales = torch.empty((*shape, *_scales(first).shape), device=device)
    for part, names in enumerate(parts):
        for expert, name in enumerate(names):
            matrix = read(name)
            if not isinstance(matrix, Fp8Matrix):
                return None
            if (matrix.shape, matrix.block) != (first.shape, first.block):
                return None
            codes[expert, part] = matrix.codes.view(torch.uint8)
            scales[expert, part] = _scales(matrix)
    is_by_row = scales.dim() == 3
    return Fp8ExpertWeight(
        codes=codes.flatten(1, 2).view(torch.float8_e4m3fn),
        scales=scales.flatten(1) if is_by_row else scales,
    )


def _is_supported(matrix: Fp8Matrix) -> bool:
    outputs, inputs = matrix.shape
    is_aligned = outputs % _ALIGN == 0 and inputs % _ALIGN == 0
    return is_aligned and (
        matrix.block[1] >= inputs or matrix.block == (SCALE_BLOCK, SCALE_BLOCK)
    )


def _scales(matrix: Fp8Matrix) -> Tensor:
    """The scales of a matrix: one for each output, or the published scales of its blocks."""
    if matrix.block == (SCALE_BLOCK, SCALE_BLOCK):
        return matrix.scales
    return matrix.scales[:, 0].repeat_interleave(matrix.block[0])[: len(matrix.codes)]
