"""Makes a fused decoder from a transformers model, if both compute the same.

Each layer runs once in transformers' code and once in ours. In both, a probe takes the place of
attention; its output depends on all its inputs. Embeddings, the last norm and logits are compared
without the layers.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.device.attention.base import Variant
from headwater.device.gpu.decoder import FusedDecoder, OutputScaling, TokenSlots
from headwater.device.gpu.layers import (
    FusedWeights,
    RotaryTable,
    fused_weights,
    has_layer_types,
    norm_of,
    rotary_table,
)
from headwater.device.gpu.mlp import DenseMLP
from headwater.device.gpu.quantized import linear_weight

_TOKENS = 16
_MOST_ROUTED_APART = 0.3
"""Share of tokens that may differ in a layer with experts. Rounding sends a few tokens to
another expert; a wrong structure would change nearly all."""

_MOST_QUANTIZED_APART = 0.1
"""Relative error of a layer with quantised weights: its inputs are rounded to e4m3."""


def fused_decoder(module: nn.Module, max_positions: int) -> FusedDecoder | None:
    """A fused form of this model; None if it has unknown parts or the results differ."""
    parts: Any = module
    model: Any = getattr(module, "model", None)
    layers, norm = getattr(model, "layers", None), norm_of(getattr(model, "norm", None))
    if layers is None or norm is None or not hasattr(model, "rotary_emb"):
        return None
    if "dynamic" in str(getattr(model.rotary_emb, "rope_type", "")):
        return None
    if getattr(getattr(parts, "lm_head", None), "bias", None) is not None:
        return None
    tables = _Tables(model, max_positions)
    fused = []
    for number, layer in enumerate(layers):
        weights = fused_weights(layer, tables.of(number))
        if weights is None:
            return None
        probe = _LayerProbe(layer, tables, number)
        if probe.variant is None:
            return None
        fused.append(weights.with_variant(probe.variant))
        if not probe.agrees(FusedDecoder(module, fused[-1:], norm, OutputScaling())):
            return None
    decoder = FusedDecoder(module, fused, norm, _scaling(module))
    return decoder if _ends_agree(module, decoder) else None


class _Tables:
    """Rotary tables of a model's layers; one for each kind of layer if these differ."""

    def __init__(self, model: Any, max_positions: int) -> None:  # noqa: ANN401 - transformers'
        self.rotary = model.rotary_emb
        self._types = getattr(model.config, "layer_types", None)
        self._differ = has_layer_types(model.rotary_emb)
        self._max_positions = max_positions
        self._made: dict[str | None, RotaryTable] = {}

    def kind(self, number: int) -> dict[str, str]:
        """Arguments of the rotary module for a layer, in addition to positions."""
        return {"layer_type": self._types[number]} if self._differ and self._types else {}

    def of(self, number: int) -> RotaryTable:
        kind = self.kind(number).get("layer_type")
        if kind not in self._made:
            self._made[kind] = rotary_table(self.rotary, self._max_positions, kind)
        return self._made[kind]


class _LayerProbe:
    """One layer run by its own code, with an attention whose output depends on all its inputs."""

    def __init__(self, layer: nn.Module, tables: _Tables, number: int) -> None:
        weight = next(layer.parameters())
        size = len(linear_weight(cast(Any, layer).self_attn.o_proj))
        self.variant: Variant | None = None
        latent = getattr(cast(Any, layer).self_attn, "latent", None)
        self.rank: int | None = None if latent is None else latent.rank
        self.hidden = torch.randn(_TOKENS, size, dtype=weight.dtype, device=weight.device)
        positions = torch.arange(_TOKENS, device=weight.device)[None]
        rotary = tables.rotary(self.hidden, position_ids=positions, **tables.kind(number))
        out = layer(self.hidden[None], position_embeddings=rotary, attention_step=self)
        self.expected: Tensor = (out[0] if isinstance(out, tuple) else out).view(_TOKENS, -1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """See `AttentionStep`; returns queries mixed with keys and values."""
        self.variant = variant
        groups = query.shape[1] // key.shape[1]
        mixed = query + (key * 0.5 + value * 0.25).repeat_interleave(groups, dim=1)
        if self.rank is None:
            return mixed
        # Of a latent only the leading elements are passed on; the rotated ones are mixed into
        # them.
        latent, rotated = mixed.tensor_split((self.rank,), dim=-1)
        latent[..., : rotated.shape[-1]] += rotated
        return latent

    def agrees(self, decoder: FusedDecoder) -> bool:
        """Whether `decoder`, which has only this layer, computes the same except for
        rounding."""
        layer = decoder.layers[0]
        if layer.latent is not None:
            return self._latent_agrees(decoder)
        dim = layer.output.shape[1] // decoder.heads
        kv_heads = (len(layer.qkv) // dim - decoder.heads) // 2
        hidden = self.hidden
        pool = hidden.new_zeros((1, 1, 2, _TOKENS, kv_heads, dim))
        positions = torch.arange(_TOKENS, dtype=torch.int32, device=hidden.device)
        places = TokenSlots(positions, torch.zeros_like(positions))

        def attend(layer: int, packed: Tensor, variant: Variant) -> Tensor:
            heads = packed.view(_TOKENS, -1, dim)
            query, key, value = heads.split((decoder.heads, kv_heads, kv_heads), dim=1)
            return self.attend(layer, query, key, value, variant).reshape(_TOKENS, -1)

        ours = decoder.run(hidden.clone(), places, pool, attend)
        return self._is_close(ours, layer)

    def _latent_agrees(self, decoder: FusedDecoder) -> bool:
        """What `agrees` returns for latent KV; the stored vectors are compared too."""
        layer, hidden = decoder.layers[0], self.hidden
        assert self.rank is not None, "its module has latents"
        size = self.rank + 2 * layer.table[0].shape[1]
        pool = hidden.new_zeros((1, 1, 1, _TOKENS, 1, size))
        positions = torch.arange(_TOKENS, dtype=torch.int32, device=hidden.device)
        places = TokenSlots(positions, torch.zeros_like(positions))

        def attend(layer: int, packed: Tensor, variant: Variant) -> Tensor:
            query, key = packed.view(_TOKENS, decoder.heads, size), pool[0, 0, 0]
            return self.attend(layer, query, key, key, variant).reshape(_TOKENS, -1)

        return self._is_close(decoder.run(hidden.clone(), places, pool, attend), layer)

    def _is_close(self, ours: Tensor, layer: FusedWeights) -> bool:
        is_exact = isinstance(layer.qkv, Tensor)
        apart = _differs(ours, self.expected, is_exact=is_exact)
        allowed = 0.0 if isinstance(layer.mlp, DenseMLP) else _MOST_ROUTED_APART
        return float(apart.float().mean()) <= allowed


def _scaling(module: nn.Module) -> OutputScaling:
    """Scaling of embeddings and logits in this family."""
    parts: Any = module
    config, embedding = parts.config, parts.model.embed_tokens
    embedding = getattr(embedding, "inner", embedding)  # split over ranks
    scale = getattr(embedding, "embed_scale", None)
    by_token = (
        1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))
    )
    return OutputScaling(
        embedding=by_token * float(getattr(parts.model, "embedding_multiplier", 1.0)),
        logits=float(getattr(config, "logits_scaling", 1.0)),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _ends_agree(module: nn.Module, decoder: FusedDecoder) -> bool:
    """Whether the logits of a model without layers are equal."""
    parts: Any = module
    device = decoder.embedding.device
    tokens = torch.arange(_TOKENS, device=device)
    layers = parts.model.layers
    parts.model.layers = nn.ModuleList()
    try:
        out = module(
            input_ids=tokens[None],
            position_ids=tokens[None],
            attention_mask=None,
            use_cache=False,
        )
    finally:
        parts.model.layers = layers
    tokens = tokens.int()
    ours = decoder.logits(decoder.embed(tokens, torch.full_like(tokens, -1), tokens))
    is_exact = isinstance(decoder.head, Tensor)
    return not bool(_differs(ours, out.logits[0], is_exact=is_exact).any())


def _differs(ours: Tensor, theirs: Tensor, *, is_exact: bool = True) -> Tensor:
    """Per row: whether the difference is larger than rounding explains. Rounding of the input
    counts too if products of quantised weights are not exact."""
    allowed = 1e-4 if ours.element_size() == 4 else 3e-2
    if not is_exact:
        allowed = _MOST_QUANTIZED_APART
    wrong = (ours.float() - theirs.float()).norm(dim=-1)
    close: Tensor = wrong <= allowed * theirs.float().norm(dim=-1)
    return ~close
