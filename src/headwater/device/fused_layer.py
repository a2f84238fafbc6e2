"""A Llama-like decoder layer with few operations.

With a small batch, the arithmetic of a layer ends before Python has called the next operation,
so the number of operations determines the time. Q, K and V are one product, rotary embedding is
applied to Q and K together, and residuals and gates are fused into products.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.device.attention.base import AttentionStep, Variant
from headwater.device.host_ops import host_ops
from headwater.device.linear import (
    ACTIVATIONS,
    AnyLinear,
    FusedNorm,
    GatedMLP,
    agree,
    make_linear,
)

_KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")


class FusedLayer(nn.Module):
    """Computes the same function as the layer it is made from; `fused_layer` checks that."""

    def __init__(self, layer: nn.Module, variant: Variant, *, min_packed_weights: int) -> None:
        super().__init__()
        attention, mlp = cast(nn.Module, layer.self_attn), cast(nn.Module, layer.mlp)
        self._layer = cast(int, attention.layer_idx)
        self._head_dim = cast(int, attention.head_dim)
        self._is_last = self._layer == cast(Any, attention.config).num_hidden_layers - 1
        self._how = variant
        self._ops = host_ops(torch.device("cpu"), torch.float32)
        self.before = _norm(cast(nn.Module, layer.input_layernorm))
        self.between = _norm(cast(nn.Module, layer.post_attention_layernorm))
        queries, keys, values = (_linear(attention, f"{n}_proj") for n in "qkv")
        self._heads = queries.out_features // self._head_dim
        self._rotated = self._heads + keys.out_features // self._head_dim

        def made(*parts: nn.Linear) -> AnyLinear:
            biases: list[Tensor | None] = [part.bias for part in parts]
            given = [bias for bias in biases if bias is not None]
            weights: list[Tensor] = [part.weight for part in parts]
            return make_linear(
                torch.cat(weights),
                torch.cat(given) if given else None,
                min_packed_weights=min_packed_weights,
            )

        self.qkv = made(queries, keys, values)
        self.output = made(_linear(attention, "o_proj"))
        gate, up, down = (made(_linear(mlp, f"{n}_proj")) for n in ("gate", "up", "down"))
        self.mlp = GatedMLP(gate, up, down, cast(nn.Module, mlp.act_fn))
        self.sum_ranks: Callable[[Tensor], Tensor] | None = None
        """Sums the partial results of the ranks, if the weights are split."""

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_step: AttentionStep,
        tokens_read: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """`tokens_read` are the tokens whose logits are computed. The last layer stores K and V
        of all tokens, but its result is correct for these tokens only."""
        qkv = self.qkv(self.before(hidden_states))[0]
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        cos, sin = position_embeddings
        rotated = self._ops.rotate(heads[:, : self._rotated], cos[0], sin[0])
        attended = attention_step.attend(
            self._layer,
            rotated[:, : self._heads],
            rotated[:, self._heads :],
            heads[:, self._rotated :],
            self._how,
        )
        attended = attended.reshape(1, len(qkv), -1)
        if not self._is_last or tokens_read is None or len(tokens_read) == len(qkv):
            return self._after_attention(attended, hidden_states)
        read = self._after_attention(attended[:, tokens_read], hidden_states[:, tokens_read])
        return hidden_states.index_copy(1, tokens_read, read)

    def _after_attention(self, attended: Tensor, hidden_states: Tensor) -> Tensor:
        hidden_states = self._add(self.output, attended, hidden_states)
        gated = self.mlp.gated(self.between(hidden_states))
        return self._add(self.mlp.down, gated, hidden_states)

    def _add(self, linear: AnyLinear, x: Tensor, hidden_states: Tensor) -> Tensor:
        if self.sum_ranks is None:
            return linear.plus(x, hidden_states)
        return self.sum_ranks(linear(x)) + hidden_states


def fused_layer(layer: nn.Module, *, min_packed_weights: int) -> FusedLayer | None:
    """A fused form of this layer; None if the layer has another structure or the results
    differ."""
    if type(layer).__name__ not in _KINDS or not _is_known(layer):
        return None
    probe = _Probe()
    expected, x, rotary = _try(layer, probe)
    if probe.variant is None or not probe.variant.has_plain_scores:
        return None
    fused = FusedLayer(layer, probe.variant, min_packed_weights=min_packed_weights)
    ours = fused(x, position_embeddings=rotary, attention_step=probe)
    return fused if agree(ours, expected) else None


class _Probe:
    """An attention whose output depends on all its inputs; it also records its arguments."""

    def __init__(self) -> None:
        self.variant: Variant | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        self.variant = variant
        groups = query.shape[1] // key.shape[1]
        mixed = key * 0.5 + value * 0.25
        return query + mixed.repeat_interleave(groups, dim=1) * (1 + layer)


def _try(layer: nn.Module, probe: _Probe) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    attention = cast(nn.Module, layer.self_attn)
    x = torch.randn(1, 5, _linear(attention, "q_proj").in_features)
    angles = torch.randn(1, 5, cast(int, attention.head_dim) // 2).repeat(1, 1, 2)
    rotary = angles.cos(), angles.sin()
    out = layer(x, position_embeddings=rotary, attention_step=probe)
    return cast(Tensor, out[0] if isinstance(out, tuple) else out), x, rotary


def _is_known(layer: nn.Module) -> bool:
    """Whether the layer consists of the expected parts."""
    return (
        type(getattr(layer.mlp, "act_fn", None)).__name__ in ACTIVATIONS
        and isinstance(getattr(layer.self_attn, "q_proj", None), nn.Linear)
        and isinstance(getattr(layer.mlp, "gate_proj", None), nn.Linear)
    )


def _linear(parent: nn.Module, name: str) -> nn.Linear:
    return cast(nn.Linear, getattr(parent, name))


def _norm(norm: nn.Module) -> FusedNorm:
    return FusedNorm(cast(Tensor, norm.weight).detach(), cast(float, norm.variance_epsilon))
