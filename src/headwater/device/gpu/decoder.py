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
from headwater.device.kernels.gated import MIN_EAGER_ROWS, gate_up
from headwater.device.kernels.gemv import fits, gemv
from headwater.device.kernels.prefill import is_slower_than_torch
from headwater.device.kernels.rotary import HeadNorms, rotate

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
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    gate_up: Tensor
    down: Tensor
    norms: HeadNorms | None
    variant: Variant


class FusedDecoder:
    """The same function as the model it is made from, provided `fused_decoder` says so."""

    def __init__(self, module: nn.Module, variants: list[Variant], max_positions: int) -> None:
        model: Any = module.model
        self.heads = int(model.config.num_attention_heads)
        self.layers = [
            _layer(layer, variant)
            for layer, variant in zip(model.layers, variants, strict=True)
        ]
        self.table = _angles(model.rotary_emb, max_positions)
        self.embedding: Tensor = model.embed_tokens.weight.data
        self.last_norm: Tensor = model.norm.weight.data
        self.epsilon = float(model.norm.variance_epsilon)
        self.head: Tensor = cast(Any, module).lm_head.weight.data

    def warm(self, pool: Tensor) -> None:
        """Compile what prompts need and no graph has."""
        hidden = self.embedding.new_zeros((MIN_EAGER_ROWS, self.embedding.shape[1]))
        gate_up(hidden, self.layers[0].gate_up, is_eager=True)
        hidden = hidden[:128]
        gate_up(hidden, self.layers[0].gate_up, is_eager=True)
        stored = self._project_qkv(self.layers[0], hidden, skipped=self.heads * pool.shape[-1])
        first = torch.zeros(128, dtype=torch.int32, device=pool.device)
        rotate(stored, first, first - 1, self.table, pool, 0, self.layers[0].norms)

    def uses_torch_attention(self, pool: Tensor) -> bool:
        """Whether torch may attend long prompts: it is faster, and every layer is plain."""
        return is_slower_than_torch(pool) and all(
            layer.variant.window is None for layer in self.layers
        )

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
        wanted: RowsToCompute | None = None,
    ) -> Tensor:
        """All layers over `hidden`, `[tokens, size]`, which is used up; of all rows, or `wanted`."""
        for number, layer in enumerate(self.layers):
            if wanted is not None and number == len(self.layers) - 1:
                return self._run_last(hidden, places, pool, wanted)
            packed = self._project_qkv(layer, hidden)
            rotate(packed, *places, self.table, pool, number, layer.norms)
            attended = attend(number, packed, layer.variant)
            self._finish_layer(layer, hidden, attended, is_eager=wanted is not None)
        return hidden

    def _run_last(
        self, hidden: Tensor, places: TokenSlots, pool: Tensor, wanted: RowsToCompute
    ) -> Tensor:
        """The last layer: K and V of all rows into the pool, everything else of `wanted`."""
        number, layer = len(self.layers) - 1, self.layers[-1]
        stored = self._project_qkv(layer, hidden, skipped=self.heads * pool.shape[-1])
        rotate(stored, *places, self.table, pool, number, layer.norms)
        hidden = hidden.index_select(0, wanted.rows)
        if not len(hidden):
            return hidden
        packed = self._project_qkv(layer, hidden)
        positions = places.positions.index_select(0, wanted.rows)
        nowhere = torch.full_like(positions, -1)  # their K and V are stored already
        rotate(packed, positions, nowhere, self.table, pool, number, layer.norms)
        attended = wanted.attend(number, packed, layer.variant)
        self._finish_layer(layer, hidden, attended, is_eager=True)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Of each row, in `out` if it is given."""
        if fits(self.head, len(hidden)):
            return gemv(hidden, self.head, norm=(self.last_norm, self.epsilon), out=out)
        normed = rows.norm(hidden, self.last_norm, self.epsilon)
        return torch.mm(normed, self.head.T, out=out)

    def _project_qkv(self, layer: Layer, hidden: Tensor, *, skipped: int = 0) -> Tensor:
        """Q, K and V of each row, less the first `skipped` numbers of them."""
        weight = layer.qkv[skipped:]
        if layer.qkv_bias is None and fits(weight, len(hidden)):
            return gemv(hidden, weight, norm=(layer.before, layer.epsilon))
        packed = hidden.new_empty((len(hidden), len(weight)))
        for part, out in zip(hidden.split(_PIECE), packed.split(_PIECE), strict=True):
            normed = rows.norm(part, layer.before, layer.epsilon)
            torch.mm(normed, weight.T, out=out)
        if layer.qkv_bias is not None:
            packed += layer.qkv_bias[skipped:]
        return packed

    def _finish_layer(
        self, layer: Layer, hidden: Tensor, attended: Tensor, *, is_eager: bool
    ) -> None:
        """Everything after attention, added to `hidden` in place.

        `is_eager` says that this is no part of a graph: each launch takes the host's time.
        """
        if fits(layer.output, len(hidden)) and fits(layer.down, len(hidden)):
            gemv(attended, layer.output, residual=hidden)
            norm = layer.between, layer.epsilon
            narrow = gemv(hidden, layer.gate_up, norm=norm, gated=True)
            gemv(narrow, layer.down, residual=hidden)
            return
        parts = zip(hidden.split(_PIECE), attended.split(_PIECE), strict=True)
        for part, attended_part in parts:
            part.addmm_(attended_part, layer.output.T)
            normed = rows.norm(part, layer.between, layer.epsilon)
            narrow = gate_up(normed, layer.gate_up, is_eager=is_eager)
            part.addmm_(narrow, layer.down.T)


def fused_decoder(module: nn.Module, max_positions: int) -> FusedDecoder | None:
    """A fused form of this model; None if it is of another kind, or would differ."""
    model: Any = getattr(module, "model", None)
    layers = getattr(model, "layers", None)
    if layers is None or not all(_is_known(layer) for layer in layers):
        return None
    if "dynamic" in str(getattr(model.rotary_emb, "rope_type", "")):
        return None
    probes = [_LayerProbe(layer, model.rotary_emb) for layer in layers]
    variants = [probe.variant for probe in probes if probe.variant is not None]
    if len(variants) < len(layers) or any(
        variant.softcap or variant.sinks for variant in variants
    ):
        return None
    fused = FusedDecoder(module, variants, max_positions)
    return fused if probes[0].agrees(fused) else None


class _LayerProbe:
    """One layer run by its own code, with an attention that shows what it was given."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        weight = cast(Tensor, cast(Any, layer).self_attn.q_proj.weight)
        self.variant: Variant | None = None
        self.hidden = torch.randn(5, weight.shape[1], dtype=weight.dtype, device=weight.device)
        positions = torch.arange(5, device=weight.device)[None]
        rotary_given = rotary(self.hidden, position_ids=positions)
        out = layer(self.hidden[None], position_embeddings=rotary_given, attention_step=self)
        self.expected: Tensor = (out[0] if isinstance(out, tuple) else out).view(5, -1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """As `AttentionStep`: queries with keys and values mixed in."""
        self.variant = variant
        groups = query.shape[1] // key.shape[1]
        return query + (key * 0.5 + value * 0.25).repeat_interleave(groups, dim=1)

    def agrees(self, fused: FusedDecoder) -> bool:
        """Whether the first layer of `fused` computes the same, but for rounding."""
        dim = fused.table[0].shape[1] * 2
        kv_heads = (fused.layers[0].qkv.shape[0] // dim - fused.heads) // 2
        hidden = self.hidden
        pool = hidden.new_zeros((1, 1, 2, 16, kv_heads, dim))
        places = TokenSlots(
            torch.arange(5, dtype=torch.int32, device=hidden.device),
            torch.full((5,), -1, dtype=torch.int32, device=hidden.device),
        )

        def attend(layer: int, packed: Tensor, variant: Variant) -> Tensor:
            heads = packed.view(5, -1, dim)
            query, key, value = heads.split((fused.heads, kv_heads, kv_heads), dim=1)
            return self.attend(layer, query, key, value, variant).reshape(5, -1)

        whole, fused.layers = fused.layers, fused.layers[:1]
        ours = fused.run(hidden.clone(), places, pool, attend)
        fused.layers = whole
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


def _layer(layer: Any, variant: Variant) -> Layer:  # noqa: ANN401 - a module of transformers'
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [part.bias for part in qkv if part.bias is not None]
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
        qkv=_fused(qkv),
        qkv_bias=torch.cat([bias.data for bias in biases]) if biases else None,
        output=attention.o_proj.weight.data,
        gate_up=_interleaved(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight.data,
        norms=norms,
        variant=variant,
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
