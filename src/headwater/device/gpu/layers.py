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
from headwater.device.gpu.mlp import DenseMLP, LayerNorm, Norm, RmsNorm
from headwater.device.gpu.moe import MoeBlock, moe_block
from headwater.device.gpu.norms import data_of, first_part, layer_norms, qk_norms, rms_norm_of
from headwater.device.gpu.quantized import (
    QuantizedLinear,
    Weight,
    interleaved,
    joined,
    linear_weight,
)
from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.rotary import HeadNorms, RotaryPairs

RotaryTable = tuple[Tensor, Tensor]
"""Cosines and sines of every position, `[positions, half of the rotated elements]`, float32."""

_ACTIVATIONS = {
    "GELUTanh": GateActivation.GELU_TANH,
    "NewGELUActivation": GateActivation.GELU_TANH,
    "ReLUSquaredActivation": GateActivation.SQUARED_RELU,
    "SiLU": GateActivation.SILU,
    "SiLUActivation": GateActivation.SILU,
}

_OUTPUTS = ("o_proj", "dense")
_BLOCKS = ("mlp", "block_sparse_moe")
_SHARED_EXPERTS = ("shared_expert", "shared_experts")
_JOINT_GATES = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))
_UNGATED = (("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"))

AnyLinear = nn.Linear | QuantizedLinear
_LINEAR = (nn.Linear, QuantizedLinear)


@dataclass(slots=True, kw_only=True, eq=False)
class FusedWeights:
    """The weights of one layer, and how it attends."""

    input_norm: Norm | None
    qkv: Weight
    qkv_bias: Tensor | None
    head_norms: HeadNorms | None
    """Norms of single heads of Q and K."""

    row_norms: HeadNorms | None
    """Norms over all of Q and all of K, as in OLMo 2."""

    output_gate: Weight | None
    """The projection of a gate, as in AFMoE: its sigmoid is multiplied with the result of
    attention before the output projection."""

    output: Weight
    output_bias: Tensor | None
    attention_norm: RmsNorm | None
    """Norm of the attention output before it is added to the residual."""

    is_parallel: bool
    """Whether the MLP gets the input of the layer, not the residual after attention."""

    mlp_norm: Norm | None
    mlp: DenseMLP | MoeBlock
    output_norm: RmsNorm | None
    """Norm of the MLP output before it is added to the residual."""

    residual_scale: float
    variant: Variant
    table: RotaryTable
    pairs: RotaryPairs = RotaryPairs.HALVES
    latent: LatentWeights | None = None
    """Set if KV is latent; then `qkv` projects to queries and the latent."""

    def with_variant(self, variant: Variant) -> "FusedWeights":
        return replace(self, variant=variant)

    def with_rotary(
        self, table: RotaryTable, pairs: RotaryPairs, *, norms_last: bool
    ) -> "FusedWeights":
        norms = self.head_norms
        if norms is not None:
            norms = norms._replace(is_last=norms_last)
        return replace(self, table=table, pairs=pairs, head_norms=norms)


def fused_weights(layer: nn.Module, table: RotaryTable) -> FusedWeights | None:
    """The weights of `layer`, whose variant is not known yet; None if it has unknown parts."""
    parts: Any = layer
    attention: Any = getattr(parts, "self_attn", None)
    qkv, output = _qkv_parts(attention), output_projection(attention)
    if qkv is None or output is None:
        return None
    scale = float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0)))
    norms = layer_norms(layer, attention.config)
    block = first_part(layer, _BLOCKS)
    mlp = _mlp(block, scale, getattr(parts, "shared_mlp", None))
    if norms is None or mlp is None:
        return None
    latent = None
    if hasattr(attention, "latent"):
        names = ("q_a_layernorm", "kv_a_layernorm")
        latent = latent_weights(
            attention, *(rms_norm_of(getattr(attention, name, None)) for name in names)
        )
        if latent is None:
            return None
    packed = _joined(qkv)
    if packed is None:
        return None
    if isinstance(mlp, MoeBlock) and isinstance(norms.before_mlp, LayerNorm):
        return None
    given: list[Tensor | None] = [part.bias for part in qkv]
    biases = [bias for bias in given if bias is not None]
    head_norms, row_norms = qk_norms(attention)
    gate = getattr(attention, "gate_proj", None)
    inner_norm = rms_norm_of(getattr(block, "post_mlp_layernorm", None))  # A.X K1
    return FusedWeights(
        input_norm=norms.before_attention,
        qkv=packed,
        qkv_bias=torch.cat([bias.data for bias in biases]) if biases else None,
        head_norms=head_norms,
        row_norms=row_norms,
        output_gate=linear_weight(gate) if isinstance(gate, _LINEAR) else None,
        output=linear_weight(output),
        output_bias=data_of(output.bias),
        attention_norm=norms.after_attention,
        is_parallel=norms.is_parallel,
        mlp_norm=norms.before_mlp,
        mlp=mlp,
        output_norm=norms.after_mlp or inner_norm,
        residual_scale=scale,
        variant=Variant(1.0),
        table=table,
        latent=latent,
    )


def output_projection(attention: nn.Module | None) -> AnyLinear | None:
    """The linear layer after attention; None if it is unknown."""
    found = first_part(attention, _OUTPUTS)
    return found if isinstance(found, _LINEAR) else None


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
    # Most modules repeat the frequencies: for the second half of the rotated elements, or each
    # for the element after it.
    if torch.equal(cosines[:, :half], cosines[:, half:]):
        cosines, sines = cosines[:, :half], sines[:, :half]
    elif torch.equal(cosines[:, 0::2], cosines[:, 1::2]):
        cosines, sines = cosines[:, 0::2], sines[:, 0::2]
    return cosines.contiguous(), sines.contiguous()


def has_layer_types(rotary: nn.Module) -> bool:
    """Whether rotary embeddings differ between kinds of layers, as in Gemma 3."""
    return "layer_type" in inspect.signature(rotary.forward).parameters


def _mlp(
    module: nn.Module | None, scale: float, shared: nn.Module | None = None
) -> DenseMLP | MoeBlock | None:
    """The weights of an MLP or of a block of experts; None if it has unknown parts. The results
    of experts are multiplied by `scale`. `shared` are shared experts outside the block."""
    parts: Any = module
    if module is None:
        return None
    if hasattr(module, "experts"):
        shared = first_part(module, _SHARED_EXPERTS) or shared
        dense = _mlp(shared, 1.0)
        if isinstance(dense, MoeBlock) or (shared is not None and dense is None):
            return None
        if dense is not None and dense.down_bias is not None:
            return None
        return moe_block(module, dense, scale)
    act = first_part(module, ("act_fn", "activation_fn", "act", "activation"))
    kind = _ACTIVATIONS.get(type(act).__name__)
    if kind is None:
        return None
    for wide, narrow in _JOINT_GATES:
        if hasattr(parts, wide):
            return _jointly_gated(module, wide, getattr(parts, narrow), kind)
    if hasattr(parts, "gate_proj"):
        return _gated(parts.gate_proj, parts.up_proj, parts.down_proj, kind)
    for wide, narrow in _UNGATED:
        if hasattr(parts, wide):
            return _ungated(getattr(parts, wide), getattr(parts, narrow), kind)
    return None


def _jointly_gated(
    mlp: nn.Module, name: str, down: AnyLinear, activation: GateActivation
) -> DenseMLP | None:
    wide: Any = getattr(mlp, name)
    # Gate and up rows of a quantised weight are not interleaved.
    if wide.bias is not None or down.bias is not None or isinstance(wide, QuantizedLinear):
        return None
    up = _interleaved_gate_up(mlp, name)
    return DenseMLP(up=up, down=linear_weight(down), activation=activation)


def _gated(
    gate: AnyLinear, up: AnyLinear, down: AnyLinear, activation: GateActivation
) -> DenseMLP | None:
    if not (gate.bias is None and up.bias is None and down.bias is None):
        return None
    both = _interleaved(gate, up)
    if both is None:
        return None
    return DenseMLP(up=both, down=linear_weight(down), activation=activation)


def _ungated(up: AnyLinear, down: AnyLinear, activation: GateActivation) -> DenseMLP:
    return DenseMLP(
        up=linear_weight(up),
        down=linear_weight(down),
        activation=activation,
        is_gated=False,
        up_bias=data_of(up.bias),
        down_bias=data_of(down.bias),
    )


def _qkv_parts(attention: nn.Module | None) -> list[AnyLinear] | None:
    parts: Any = attention
    if attention is None:
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
    """Replaces a linear layer whose outputs are gate, then up. In the weight of this layer,
    their rows are interleaved."""

    bias = None

    def __init__(self, gate_up: nn.Linear) -> None:
        super().__init__()
        gate, up = gate_up.weight.data.chunk(2)
        whole = torch.stack((gate, up), dim=1).view(gate_up.weight.shape)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        both = nn.functional.linear(x, self.weight)
        return torch.cat((both[..., 0::2], both[..., 1::2]), dim=-1)


def _interleaved_gate_up(mlp: nn.Module, name: str) -> Tensor:
    """The weight of a joint projection, with rows of gate and up interleaved from now on."""
    joint: Any = getattr(mlp, name)
    if not isinstance(joint, InterleavedGateUp):
        joint = InterleavedGateUp(joint)
        setattr(mlp, name, joint)
    return cast(Tensor, joint.weight.data)
