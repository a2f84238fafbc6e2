"""A decoder of the Llama kind for the GPU: fused weights, few launches, nothing that waits.

Q, K and V are one product, gate and up another; residuals are added inside products, and with
one row norms and gates are computed inside them too. It reads the same memory as the
transformers model it is made from, whose parameters become views of the fused ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from headwater.device.attention.base import Variant
from headwater.device.kernels import rows
from headwater.device.kernels.gated import LEAST_LAUNCHED, gate_up
from headwater.device.kernels.prefill import loses_to_torch
from headwater.device.kernels.rotary import HeadNorms, rotate
from headwater.device.kernels.skinny import fits, skinny

_KINDS = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
)
_PIECE = 8192
"""Rows computed at once between attentions: cuBLAS is 15 % slower with four times as many."""

Attend = Callable[[int, Tensor, Variant], Tensor]
"""Attention of a layer over packed Q, K and V."""


class RowsToCompute(NamedTuple):
    """The rows whose result is wanted: of others the last layer computes K and V alone."""

    rows: Tensor
    attend: Attend
    """Of these rows only, each a token over its context in the pool."""


class TokenSlots(NamedTuple):
    """Where a step's tokens are in their sequences and in the pool; int32 on the device."""

    positions: Tensor
    slots: Tensor
    """-1 is stored nowhere."""


@dataclass(slots=True, kw_only=True, eq=False)
class Layer:
    """The weights of one layer, and how it attends."""

    before: Tensor
    between: Tensor
    epsilon: float
    inward: Tensor
    inward_bias: Tensor | None
    outward: Tensor
    gate_up: Tensor
    down: Tensor
    norms: HeadNorms | None
    how: Variant


class FusedDecoder:
    """The same function as the model it is made from, provided `lean_decoder` says so."""

    def __init__(self, module: nn.Module, variants: list[Variant], max_positions: int) -> None:
        model: Any = module.model
        self.heads = int(model.config.num_attention_heads)
        self.layers = [
            _layer(layer, how) for layer, how in zip(model.layers, variants, strict=True)
        ]
        self.table = _angles(model.rotary_emb, max_positions)
        self.embedding: Tensor = model.embed_tokens.weight.data
        self.last_norm: Tensor = model.norm.weight.data
        self.epsilon = float(model.norm.variance_epsilon)
        self.head: Tensor = cast(Any, module).lm_head.weight.data

    def warm(self, pool: Tensor) -> None:
        """Compile what prompts need and no graph has."""
        hidden = self.embedding.new_zeros((LEAST_LAUNCHED, self.embedding.shape[1]))
        gate_up(hidden, self.layers[0].gate_up, is_launched=True)
        hidden = hidden[:128]
        gate_up(hidden, self.layers[0].gate_up, is_launched=True)
        stored = self._inward(self.layers[0], hidden, skipped=self.heads * pool.shape[-1])
        first = torch.zeros(128, dtype=torch.int32, device=pool.device)
        rotate(stored, first, first - 1, self.table, pool, 0, self.layers[0].norms)

    def takes_whole(self, pool: Tensor) -> bool:
        """Whether torch may attend long prompts: it is faster, and every layer is plain."""
        return loses_to_torch(pool) and all(layer.how.window is None for layer in self.layers)

    def embed(self, tokens: Tensor, carry: Tensor, chosen: Tensor) -> Tensor:
        """The first hidden states; a token is carried from `chosen` where `carry` says so."""
        return rows.embed(tokens, carry, chosen, self.embedding)

    def run(
        self,
        hidden: Tensor,
        places: TokenSlots,
        pool: Tensor,
        attend: Attend,
        *,
        kept: RowsToCompute | None = None,
    ) -> Tensor:
        """All layers over `hidden`, `[tokens, size]`, which is used up; of all rows, or `kept`."""
        for number, layer in enumerate(self.layers):
            if kept is not None and number == len(self.layers) - 1:
                return self._run_last(hidden, places, pool, kept)
            packed = self._inward(layer, hidden)
            rotate(packed, *places, self.table, pool, number, layer.norms)
            attended = attend(number, packed, layer.how)
            self._outward(layer, hidden, attended, is_launched=kept is not None)
        return hidden

    def _run_last(
        self, hidden: Tensor, places: TokenSlots, pool: Tensor, kept: RowsToCompute
    ) -> Tensor:
        """The last layer: K and V of all rows into the pool, everything else of `kept`."""
        number, layer = len(self.layers) - 1, self.layers[-1]
        stored = self._inward(layer, hidden, skipped=self.heads * pool.shape[-1])
        rotate(stored, *places, self.table, pool, number, layer.norms)
        hidden = hidden.index_select(0, kept.rows)
        if not len(hidden):
            return hidden
        packed = self._inward(layer, hidden)
        positions = places.positions.index_select(0, kept.rows)
        nowhere = torch.full_like(positions, -1)  # their K and V are stored already
        rotate(packed, positions, nowhere, self.table, pool, number, layer.norms)
        attended = kept.attend(number, packed, layer.how)
        self._outward(layer, hidden, attended, is_launched=True)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Of each row, in `out` if it is given."""
        if fits(self.head, len(hidden)):
            return skinny(hidden, self.head, norm=(self.last_norm, self.epsilon), out=out)
        normed = rows.norm(hidden, self.last_norm, self.epsilon)
        return torch.mm(normed, self.head.T, out=out)

    def _inward(self, layer: Layer, hidden: Tensor, *, skipped: int = 0) -> Tensor:
        """Q, K and V of each row, less the first `skipped` numbers of them."""
        weight = layer.inward[skipped:]
        if layer.inward_bias is None and fits(weight, len(hidden)):
            return skinny(hidden, weight, norm=(layer.before, layer.epsilon))
        packed = hidden.new_empty((len(hidden), len(weight)))
        for part, out in zip(hidden.split(_PIECE), packed.split(_PIECE), strict=True):
            normed = rows.norm(part, layer.before, layer.epsilon)
            torch.mm(normed, weight.T, out=out)
        if layer.inward_bias is not None:
            packed += layer.inward_bias[skipped:]
        return packed

    def _outward(
        self, layer: Layer, hidden: Tensor, attended: Tensor, *, is_launched: bool
    ) -> None:
        """Everything after attention, added to `hidden` in place.

        `is_launched` says that this is no part of a graph: each launch takes the host's time.
        """
        if fits(layer.outward, len(hidden)) and fits(layer.down, len(hidden)):
            skinny(attended, layer.outward, residual=hidden)
            norm = layer.between, layer.epsilon
            narrow = skinny(hidden, layer.gate_up, norm=norm, gated=True)
            skinny(narrow, layer.down, residual=hidden)
            return
        parts = zip(hidden.split(_PIECE), attended.split(_PIECE), strict=True)
        for part, attended_part in parts:
            part.addmm_(attended_part, layer.outward.T)
            normed = rows.norm(part, layer.between, layer.epsilon)
            narrow = gate_up(normed, layer.gate_up, is_launched=is_launched)
            part.addmm_(narrow, layer.down.T)


def lean_decoder(module: nn.Module, max_positions: int) -> FusedDecoder | None:
    """A lean form of this model; None if it is of another kind, or would differ."""
    model: Any = getattr(module, "model", None)
    layers = getattr(model, "layers", None)
    if layers is None or not all(_is_known(layer) for layer in layers):
        return None
    if "dynamic" in str(getattr(model.rotary_emb, "rope_type", "")):
        return None
    tried = [_Trial(layer, model.rotary_emb) for layer in layers]
    variants = [trial.how for trial in tried if trial.how is not None]
    if len(variants) < len(layers) or any(how.softcap or how.sinks for how in variants):
        return None
    lean = FusedDecoder(module, variants, max_positions)
    return lean if tried[0].agrees(lean) else None


class _Trial:
    """One layer run by its own code, with an attention that shows what it was given."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        weight = cast(Tensor, cast(Any, layer).self_attn.q_proj.weight)
        self.how: Variant | None = None
        self.hidden = torch.randn(5, weight.shape[1], dtype=weight.dtype, device=weight.device)
        positions = torch.arange(5, device=weight.device)[None]
        rotary_given = rotary(self.hidden, position_ids=positions)
        out = layer(self.hidden[None], position_embeddings=rotary_given, attention_step=self)
        self.expected: Tensor = (out[0] if isinstance(out, tuple) else out).view(5, -1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """As `AttentionStep`: queries with keys and values mixed in."""
        self.how = variant
        groups = query.shape[1] // key.shape[1]
        return query + (key * 0.5 + value * 0.25).repeat_interleave(groups, dim=1)

    def agrees(self, lean: FusedDecoder) -> bool:
        """Whether the first layer of `lean` computes the same, but for rounding."""
        dim = lean.table[0].shape[1] * 2
        kv_heads = (lean.layers[0].inward.shape[0] // dim - lean.heads) // 2
        hidden = self.hidden
        pool = hidden.new_zeros((1, 1, 2, 16, kv_heads, dim))
        places = TokenSlots(
            torch.arange(5, dtype=torch.int32, device=hidden.device),
            torch.full((5,), -1, dtype=torch.int32, device=hidden.device),
        )

        def attend(layer: int, packed: Tensor, how: Variant) -> Tensor:
            heads = packed.view(5, -1, dim)
            query, key, value = heads.split((lean.heads, kv_heads, kv_heads), dim=1)
            return self.attend(layer, query, key, value, how).reshape(5, -1)

        whole, lean.layers = lean.layers, lean.layers[:1]
        ours = lean.run(hidden.clone(), places, pool, attend)
        lean.layers = whole
        allowed = 1e-4 if hidden.element_size() == 4 else 3e-2
        wrong = (ours.float() - self.expected.float()).norm()
        return bool(wrong < allowed * self.expected.float().norm())


def _is_known(layer: nn.Module) -> bool:
    """Made of the parts this module expects."""
    parts: Any = layer
    if type(layer).__name__ not in _KINDS:
        return False
    plain = (
        parts.self_attn.o_proj,
        parts.mlp.gate_proj,
        parts.mlp.up_proj,
        parts.mlp.down_proj,
    )
    return "SiLU" in type(parts.mlp.act_fn).__name__ and all(p.bias is None for p in plain)


def _layer(layer: Any, how: Variant) -> Layer:  # noqa: ANN401 - a module of transformers'
    attention, mlp = layer.self_attn, layer.mlp
    inward = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [part.bias for part in inward if part.bias is not None]
    norms = None
    if hasattr(attention, "q_norm"):
        norms = HeadNorms(
            attention.q_norm.weight.data,
            attention.k_norm.weight.data,
            float(attention.q_norm.variance_epsilon),
        )
    return Layer(
        before=layer.input_layernorm.weight.data,
        between=layer.post_attention_layernorm.weight.data,
        epsilon=float(layer.input_layernorm.variance_epsilon),
        inward=_fused(inward),
        inward_bias=torch.cat([bias.data for bias in biases]) if biases else None,
        outward=attention.o_proj.weight.data,
        gate_up=_interleaved(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight.data,
        norms=norms,
        how=how,
    )


def _fused(parts: list[nn.Linear]) -> Tensor:
    """One weight of all parts, which become views of it, or are already."""
    weights: list[Tensor] = [part.weight.data for part in parts]
    if len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:
        first, num_rows = weights[0], sum(len(weight) for weight in weights)
        return first.as_strided((num_rows, first.shape[1]), (first.shape[1], 1))
    whole = torch.cat(weights)
    pieces = whole.split([len(weight) for weight in weights])
    for part, piece in zip(parts, pieces, strict=True):
        part.weight.data = piece
    return whole


def _interleaved(gate: nn.Linear, up: nn.Linear) -> Tensor:
    """One weight of the rows of both in turn, which become views of it, or are already."""
    first: Tensor = gate.weight.data
    num_rows, size = first.shape
    if first.stride(0) == 2 * size:
        return first.as_strided((2 * num_rows, size), (size, 1))
    whole = torch.stack((first, up.weight.data), dim=1).view(2 * num_rows, size)
    gate.weight.data, up.weight.data = whole[0::2], whole[1::2]
    return whole


def _angles(rotary: nn.Module, max_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, `[positions, half a head]`, float32."""
    device = next(rotary.buffers()).device
    positions = torch.arange(max_positions, device=device)[None]
    cosines, sines = rotary(torch.zeros(1, device=device), position_ids=positions)
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()
