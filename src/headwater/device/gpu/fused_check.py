"""Makes a fused decoder from a transformers model, if both compute the same.

Each layer runs once in transformers' code and once in ours. In both, a probe takes the place of
attention; its output depends on all its inputs. Embeddings, the last norm and logits are compared
without the layers.
"""

from collections.abc import Iterator
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
    output_projection,
    rotary_table,
)
from headwater.device.gpu.mlp import DenseMLP, Norm
from headwater.device.gpu.norms import final_norm
from headwater.device.gpu.quantized import linear_weight
from headwater.device.kernels.rotary import RotaryPairs

_TOKENS = 16
_MOST_ROUTED_APART = 0.3
"""Share of tokens that may differ in a layer with experts. Rounding sends a few tokens to
another expert; a wrong structure would change nearly all."""

_MOST_QUANTIZED_APART = 0.1
"""Relative error of a layer with quantised weights: its inputs are rounded to e4m3."""


def fused_decoder(module: nn.Module, max_positions: int) -> FusedDecoder | None:
    """A fused form of this model; None if it has unknown parts or the results differ."""
    model: Any = getattr(module, "model", None)
    layers, rotary = getattr(model, "layers", None), getattr(model, "rotary_emb", None)
    if layers is None or rotary is None:
        return None
    norm = final_norm(model)
    if norm is None or "dynamic" in str(getattr(rotary, "rope_type", "")):
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
        weights = weights.with_variant(probe.variant)
        for form in _rotary_forms(weights, tables, number):
            if probe.agrees(FusedDecoder(module, [form], norm, OutputScaling())):
                fused.append(form)
                break
        else:
            return None
    return _with_ends(module, fused, norm)


def _rotary_forms(
    weights: FusedWeights, tables: "_Tables", number: int
) -> Iterator[FusedWeights]:
    """The weights with each way in which heads are rotated and normalised in some family, the
    usual one first. The order of elements in the pool is that of the model's own code."""
    if weights.latent is not None:
        yield weights
        return
    for table, pairs in tables.rotations(number):
        yield weights.with_rotary(table, pairs, norms_last=False)
        if weights.head_norms is not None:
            yield weights.with_rotary(table, pairs, norms_last=True)


class _Tables:
    """Rotary tables of a model's layers; one for each kind of layer if these differ."""

    def __init__(self, model: Any, max_positions: int) -> None:  # noqa: ANN401 - transformers'
        self.rotary = model.rotary_emb
        self._types = getattr(model.config, "layer_types", None)
        self._differ = has_layer_types(model.rotary_emb)
        self._max_positions = max_positions
        self._made: dict[str | None, RotaryTable] = {}
        self._backwards: dict[str | None, RotaryTable] = {}
        device = next(model.rotary_emb.buffers()).device
        one = torch.ones((max_positions, 1), device=device)
        self._still = one, torch.zeros_like(one)
        """The table of layers without rotary embedding: one pair of elements, rotated by an
        angle of zero."""

    def kind(self, number: int) -> dict[str, str]:
        """Arguments of the rotary module for a layer, in addition to positions."""
        return {"layer_type": self._types[number]} if self._differ and self._types else {}

    def of(self, number: int) -> RotaryTable:
        kind = self.kind(number).get("layer_type")
        if kind not in self._made:
            self._made[kind] = rotary_table(self.rotary, self._max_positions, kind)
        return self._made[kind]

    def rotations(self, number: int) -> Iterator[tuple[RotaryTable, RotaryPairs]]:
        """The ways of rotation: pairs of halves, pairs of neighbours, none, and backwards."""
        table = self.of(number)
        yield table, RotaryPairs.HALVES
        yield table, RotaryPairs.NEIGHBOURS
        yield self._still, RotaryPairs.HALVES
        kind = self.kind(number).get("layer_type")
        if kind not in self._backwards:
            self._backwards[kind] = table[0], -table[1]
        yield self._backwards[kind], RotaryPairs.HALVES


class _LayerProbe:
    """One layer run by its own code, with an attention whose output depends on all its inputs."""

    def __init__(self, layer: nn.Module, tables: _Tables, number: int) -> None:
        weight = next(layer.parameters())
        output = output_projection(cast(Any, layer).self_attn)
        assert output is not None, "the weights of its layer are known"
        size = len(linear_weight(output))
        self.variant: Variant | None = None
        self._heads: Tensor | None = None
        """The last Q and K that it was given."""
        latent = getattr(cast(Any, layer).self_attn, "latent", None)
        self.rank: int | None = None if latent is None else latent.rank
        self.hidden = torch.randn(_TOKENS, size, dtype=weight.dtype, device=weight.device)
        positions = torch.arange(_TOKENS, device=weight.device)[None]
        rotary = tables.rotary(self.hidden, position_ids=positions, **tables.kind(number))
        out = layer(self.hidden[None], position_embeddings=rotary, attention_step=self)
        self.expected: Tensor = (out[0] if isinstance(out, tuple) else out).view(_TOKENS, -1)
        self._expected_heads: Tensor | None = self._heads

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """See `AttentionStep`; returns queries mixed with keys and values."""
        self.variant = variant
        self._heads = torch.cat((query.flatten(1), key.flatten(1)), dim=1)
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
        return self._are_heads_close(layer) and self._is_close(ours, layer)

    def _are_heads_close(self, layer: FusedWeights) -> bool:
        """Whether the last Q and K are those of the layer's own code. A wrong rotation may be
        small beside the residual, so the layer's result does not show it."""
        assert self._heads is not None, "the decoder attends"
        assert self._expected_heads is not None, "the layer attends"
        is_exact = isinstance(layer.qkv, Tensor)
        return not bool(_differs(self._heads, self._expected_heads, is_exact=is_exact).any())

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


def _with_ends(
    module: nn.Module, layers: list[FusedWeights], norm: Norm
) -> FusedDecoder | None:
    """The decoder of these layers, if embeddings and logits also agree with the model's own."""
    embedding = cast(Any, module).model.embed_tokens.weight
    tokens = torch.arange(_TOKENS, device=embedding.device)
    first, logits = _run_ends(module, tokens)
    ints = tokens.int()
    for embedding_norm in (None, norm):
        scaling = _scaling(module, embedding_norm)
        decoder = FusedDecoder(module, layers, norm, scaling)
        hidden = decoder.embed(ints, torch.full_like(ints, -1), ints)
        if bool(_differs(hidden, first).any()):
            continue
        is_exact = isinstance(decoder.head, Tensor)
        ours = decoder.logits(hidden)
        return None if bool(_differs(ours, logits, is_exact=is_exact).any()) else decoder
    return None


def _scaling(module: nn.Module, embedding_norm: Norm | None) -> OutputScaling:
    """Scaling of embeddings and logits in this family."""
    parts: Any = module
    config, embedding = parts.config, parts.model.embed_tokens
    embedding = getattr(embedding, "inner", embedding)  # split over ranks
    scale = getattr(embedding, "embed_scale", None)
    by_token = (
        1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))
    )
    if getattr(config, "mup_enabled", False):  # AFMoE
        by_token *= float(config.hidden_size**0.5)
    return OutputScaling(
        embedding=by_token * float(getattr(parts.model, "embedding_multiplier", 1.0)),
        logits=float(
            getattr(config, "logits_scaling", 1.0) / getattr(parts, "logit_scale", 1.0)
        ),
        softcap=getattr(config, "final_logit_softcapping", None),
        embedding_norm=embedding_norm,
    )


class _FirstHidden(nn.Module):
    """Stands for all layers of a model; records what the first one would get."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        self.hidden = hidden_states
        return hidden_states


def _run_ends(module: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The first hidden states and the logits of a model without layers."""
    parts: Any = module
    layers, recorder = parts.model.layers, _FirstHidden()
    parts.model.layers = nn.ModuleList([recorder])
    try:
        out = module(
            input_ids=tokens[None],
            position_ids=tokens[None],
            attention_mask=None,
            use_cache=False,
        )
    finally:
        parts.model.layers = layers
    assert recorder.hidden is not None, "the model calls its layers"
    return recorder.hidden[0], out.logits[0]


def _differs(ours: Tensor, theirs: Tensor, *, is_exact: bool = True) -> Tensor:
    """Per row: whether the difference is larger than rounding explains. Rounding of the input
    counts too if products of quantised weights are not exact."""
    allowed = 1e-4 if ours.element_size() == 4 else 3e-2
    if not is_exact:
        allowed = _MOST_QUANTIZED_APART
    wrong = (ours.float() - theirs.float()).norm(dim=-1)
    close: Tensor = wrong <= allowed * theirs.float().norm(dim=-1)
    return ~close
