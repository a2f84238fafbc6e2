"""Weights of a decoder layer for the fused decoder, taken from a transformers module.

Q, K and V become one weight; gate and up become another with interleaved rows. The module's own
parameters become views of these, so a model is in memory once. A layer is recognised by its
parts, not by its name; `fused_check` then compares the results.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.device.attention.base import Variant
from headwater.device.gpu.latent import LatentWeights, latent_parts, latent_weights
from headwater.device.gpu.mlp import DenseMLP, RmsNorm
from headwater.device.gpu.moe import MoeBlock, moe_block
from headwater.device.gpu.quantized import (
    QuantizedLinear,
    Weight,
    interleaved,
    joined,
    linear_weight,
)
from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.rotary import HeadNorms

RotaryTable = tuple[Tensor, Tensor]
"""Cosines and sines of every position, `[positions, half of the rotated elements]`, float32."""

_ACTIVATIONS = {
    "GELUTanh": GateActivation.GELU_TANH,
    "SiLU": GateActivation.SILU,
    "SiLUActivation": GateActivation.SILU,
}

AnyLinear = nn.Linear | QuantizedLinear
_LINEAR = (nn.Linear, QuantizedLinear)


@dataclass(slots=True, kw_only=True, eq=False)
class FusedWeights:
    """The weights of one layer, and how it attends."""

    input_norm: RmsNorm | None
    qkv: Weight
    qkv_bias: Tensor | None
    head_norms: HeadNorms | None
    """Norms of single heads of Q and K."""

    row_norms: HeadNorms | None
    """Norms over all of Q and all of K, as in OLMo 2."""

    output: Weight
    output_bias: Tensor | None
    attention_norm: RmsNorm | None
    """Norm of the attention output before it is added to the residual."""

    mlp_norm: RmsNorm | None
    mlp: DenseMLP | MoeBlock
    output_norm: RmsNorm | None
    """Norm of the MLP output before it is added to the residual."""

    residual_scale: float
    variant: Variant
    table: RotaryTable
    latent: LatentWeights | None = None
    """Set if KV is latent; then `qkv` projects to queries and the latent."""

    def with_variant(self, variant: Variant) -> "FusedWeights":
        return replace(self, variant=variant)


def fused_weights(layer: nn.Module, table: RotaryTable) -> FusedWeights | None:
    """The weights of `layer`, whose variant is not known yet; None if it has unknown parts."""
    parts: Any = layer
    norms = _layer_norms(layer)
    mlp = _mlp(getattr(parts, "mlp", None))
    attention: Any = getattr(parts, "self_attn", None)
    qkv = _qkv_parts(attention)
    if norms is None or mlp is None or qkv is None:
        return None
    latent = None
    if hasattr(attention, "latent"):
        names = ("q_a_layernorm", "kv_a_layernorm")
        latent = latent_weights(
            attention, *(norm_of(getattr(attention, name, None)) for name in names)
        )
        if latent is None:
            return None
    packed = _joined(qkv)
    if packed is None:
        return None
    input_norm, attention_norm, mlp_norm, output_norm = norms
    if isinstance(mlp, MoeBlock) and (mlp_norm is None or output_norm is not None):
        return None
    given: list[Tensor | None] = [part.bias for part in qkv]
    biases = [bias for bias in given if bias is not None]
    q_norm, k_norm = (norm_of(getattr(attention, f"{name}_norm", None)) for name in "qk")
    head_norms = row_norms = None
    if q_norm is not None and k_norm is not None:
        both = HeadNorms(q_norm.weight, k_norm.weight, q_norm.epsilon)
        is_by_head = len(q_norm.weight) == attention.head_dim
        head_norms, row_norms = (both, None) if is_by_head else (None, both)
    return FusedWeights(
        input_norm=input_norm,
        qkv=packed,
        qkv_bias=torch.cat([bias.data for bias in biases]) if biases else None,
        head_norms=head_norms,
        row_norms=row_norms,
        output=linear_weight(attention.o_proj),
        output_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.data,
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
        mlp=mlp,
        output_norm=output_norm,
        residual_scale=float(
            getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0))
        ),
        variant=Variant(1.0),
        table=table,
        latent=latent,
    )


def rotary_table(rotary: nn.Module, max_positions: int, layer_type: str | None) -> RotaryTable:
    """Cosines and sines of every position; those of layers of `layer_type` if kinds of layers
    differ."""
    device = next(rotary.buffers()).device
    positions = torch.arange(max_positions, device=device)[None]
    own = {"layer_type": layer_type} if has_layer_types(rotary) else {}
    turns = rotary(torch.zeros(1, device=device), position_ids=positions, **own)
    if isinstance(turns, Tensor):  # complex numbers, in DeepSeek-V2
        return turns[0].real.float().contiguous(), turns[0].imag.float().contiguous()
    cosines, sines = turns[0][0], turns[1][0]
    half = cosines.shape[-1] // 2
    # Most modules repeat the frequencies for the second half of the rotated elements.
    if torch.equal(cosines[:, :half], cosines[:, half:]):
        cosines, sines = cosines[:, :half], sines[:, :half]
    return cosines.contiguous(), sines.contiguous()


def has_layer_types(rotary: nn.Module) -> bool:
    """Whether rotary embeddings differ between kinds of layers, as in Gemma 3."""
    return "layer_type" in inspect.signature(rotary.forward).parameters


Norms = tuple[RmsNorm | None, RmsNorm | None, RmsNorm | None, RmsNorm | None]


def _layer_norms(layer: nn.Module) -> Norms | None:
    """The norms of a layer: before attention, after it, before the MLP, after it."""
    names = [name for name, _ in layer.named_children() if name.endswith("layernorm")]
    found = {name: norm_of(getattr(layer, name)) for name in names}
    if any(norm is None for norm in found.values()):
        return None
    first, second = found.get("input_layernorm"), found.get("post_attention_layernorm")
    third = found.get("pre_feedforward_layernorm")
    fourth = found.get("post_feedforward_layernorm")
    if set(names) == {"input_layernorm", "post_attention_layernorm"}:
        return first, None, second, None
    if len(names) == 4 and third is not None and fourth is not None:
        return first, second, third, fourth
    if set(names) == {"post_attention_layernorm", "post_feedforward_layernorm"}:
        return None, second, None, fourth
    return None


def norm_of(norm: nn.Module | None) -> RmsNorm | None:
    """The weights of a norm. Some norms multiply by their weight plus one; this is found by
    trying the norm."""
    weight = getattr(norm, "weight", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if norm is None or not isinstance(weight, Tensor) or not isinstance(epsilon, float):
        return None
    x = torch.randn(2, len(weight), device=weight.device, dtype=weight.dtype)
    expected = norm(x).float()
    plain = torch.rms_norm(x.float(), [len(weight)], None, epsilon)
    for candidate in (weight.data, weight.data.float() + 1.0):
        if torch.allclose(plain * candidate.float(), expected, rtol=0.02, atol=0.02):
            return RmsNorm(candidate, epsilon)
    return None


def _mlp(module: nn.Module | None) -> DenseMLP | MoeBlock | None:
    parts: Any = module
    if module is None:
        return None
    if hasattr(module, "experts"):
        shared = getattr(parts, "shared_expert", getattr(parts, "shared_experts", None))
        dense = _mlp(shared)
        if isinstance(dense, MoeBlock) or (shared is not None and dense is None):
            return None
        return moe_block(module, dense)
    activation = getattr(parts, "act_fn", getattr(parts, "activation_fn", None))
    kind = _ACTIVATIONS.get(type(activation).__name__)
    down = getattr(parts, "down_proj", None)
    if kind is None or down is None or down.bias is not None:
        return None
    if hasattr(parts, "gate_up_proj"):
        if parts.gate_up_proj.bias is not None:
            return None
        if isinstance(parts.gate_up_proj, QuantizedLinear):
            return None  # its gate and up rows are not interleaved
        gate_up = _interleaved_gate_up(module)
        return DenseMLP(gate_up=gate_up, down=linear_weight(down), activation=kind)
    gate, up = getattr(parts, "gate_proj", None), getattr(parts, "up_proj", None)
    if gate is None or up is None or gate.bias is not None or up.bias is not None:
        return None
    both = _interleaved(gate, up)
    if both is None:
        return None
    return DenseMLP(gate_up=both, down=linear_weight(down), activation=kind)


def _qkv_parts(attention: nn.Module | None) -> list[AnyLinear] | None:
    parts: Any = attention
    if not isinstance(getattr(parts, "o_proj", None), _LINEAR):
        return None
    if hasattr(parts, "latent"):
        return cast(list[AnyLinear] | None, latent_parts(parts))
    if hasattr(parts, "qkv_proj"):
        return [parts.qkv_proj]
    found = [getattr(parts, f"{name}_proj", None) for name in "qkv"]
    if not all(isinstance(part, _LINEAR) for part in found):
        return None
    return cast(list[AnyLinear], found)


def _joined(parts: list[AnyLinear]) -> Weight | None:
    """One weight of all parts, which become views of it unless they already are. None if they
    are quantised differently."""
    quantized = [part for part in parts if isinstance(part, QuantizedLinear)]
    if quantized:
        return joined(quantized) if len(quantized) == len(parts) else None
    plain = [part for part in parts if isinstance(part, nn.Linear)]
    weights: list[Tensor] = [part.weight.data for part in plain]
    if len(weights) == 1:
        return weights[0]
    if len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:
        first, num_rows = weights[0], sum(len(weight) for weight in weights)
        return first.as_strided((num_rows, first.shape[1]), (first.shape[1], 1))
    whole = torch.cat(weights)
    pieces = whole.split([len(weight) for weight in weights])
    for part, piece in zip(plain, pieces, strict=True):
        part.weight.data = piece
    return whole


def _interleaved(gate: AnyLinear, up: AnyLinear) -> Weight | None:
    """One weight with the interleaved rows of both, which become views of it unless they
    already are. None if they are quantised differently."""
    if isinstance(gate, QuantizedLinear) or isinstance(up, QuantizedLinear):
        if isinstance(gate, QuantizedLinear) and isinstance(up, QuantizedLinear):
            return interleaved(gate, up)
        return None
    first: Tensor = gate.weight.data
    num_rows, size = first.shape
    if first.stride(0) == 2 * size:
        return first.as_strided((2 * num_rows, size), (size, 1))
    whole = torch.stack((first, up.weight.data), dim=1).view(2 * num_rows, size)
    gate.weight.data, up.weight.data = whole[0::2], whole[1::2]
    return whole


class InterleavedGateUp(nn.Module):
    """Replaces a linear layer with outputs gate, then up; its weight has their rows
    interleaved."""

    bias = None

    def __init__(self, gate_up: nn.Linear) -> None:
        super().__init__()
        gate, up = gate_up.weight.data.chunk(2)
        whole = torch.stack((gate, up), dim=1).view(gate_up.weight.shape)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        both = nn.functional.linear(x, self.weight)
        return torch.cat((both[..., 0::2], both[..., 1::2]), dim=-1)


def _interleaved_gate_up(mlp: nn.Module) -> Tensor:
    """The weight of a joint projection, with rows of gate and up interleaved from now on."""
    parts: Any = mlp
    if not isinstance(parts.gate_up_proj, InterleavedGateUp):
        parts.gate_up_proj = InterleavedGateUp(parts.gate_up_proj)
    return cast(Tensor, parts.gate_up_proj.weight.data)
