"""A decoder for the GPU with fused weights and few launches, which never waits for the device.

Q, K and V are one GEMM; gate and up are another with a fused activation; residuals are added
inside GEMMs. With one row, norms are computed inside GEMMs too. It reads the same memory as the
transformers model it is made from.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from headwater.device.attention.base import Variant
from headwater.device.gpu.attention import MIN_TORCH_TOKENS
from headwater.device.gpu.latent_prompt import MIN_EXPANDED_TOKENS, attend_prompt, can_expand
from headwater.device.gpu.layers import FusedWeights
from headwater.device.gpu.mlp import (
    MAX_GEMM_ROWS,
    DenseMLP,
    Norm,
    RankSum,
    RmsNorm,
    activated,
    add_dense,
    add_linear,
    normed,
    product,
)
from headwater.device.gpu.moe import MoeBlock, add_moe
from headwater.device.gpu.quantized import Weight, linear_weight, rows_from
from headwater.device.kernels import rows
from headwater.device.kernels.gated import MIN_EAGER_ROWS
from headwater.device.kernels.prefill import is_slower_than_torch
from headwater.device.kernels.rotary import rotate
from headwater.device.parallel.group import RankGroup
from headwater.device.parallel.sharding import SplitEmbedding, own_heads

Attend = Callable[[int, Tensor, Variant], Tensor]
"""Attention of a layer over packed Q, K and V."""


class RowsToCompute(NamedTuple):
    """The rows that are sampled; for all others the last layer computes only K and V."""

    rows: Tensor
    attend: Attend
    """Attention of these rows only, each one token over its context in the pool."""


class TokenSlots(NamedTuple):
    """Positions of a step's tokens in their sequences and in the pool; int32 on the device."""

    positions: Tensor
    slots: Tensor
    """-1 means that the token is not stored."""


class OutputScaling(NamedTuple):
    """Scaling of embeddings and logits in some families."""

    embedding: float = 1.0
    logits: float = 1.0
    softcap: float | None = None
    embedding_norm: Norm | None = None


class FusedDecoder:
    """Computes the same function as the model it is made from; `fused_check` verifies this."""

    def __init__(
        self,
        module: nn.Module,
        layers: list[FusedWeights],
        norm: Norm,
        scaling: OutputScaling,
    ) -> None:
        parts: Any = module
        self.heads = own_heads(module)
        self.layers = layers
        embedding = parts.model.embed_tokens
        self.embedding: Tensor = embedding.weight.data
        self._split = embedding if isinstance(embedding, SplitEmbedding) else None
        self._group: RankGroup | None = None
        self._ranks: RankSum | None = None
        self.norm = norm
        self.scaling = scaling
        self.head: Weight = linear_weight(parts.lm_head)
        self._head_bias: Tensor | None = parts.lm_head.bias
        total = self.head.shape[0] if self._split is None else int(parts.config.vocab_size)
        self.vocab_size = total

    def connect(self, group: RankGroup) -> None:
        """Compute one rank's part, with the collectives of `group`."""
        self._group = group
        self._ranks = RankSum(group.sum, group.is_first)

    def warm(self, pool: Tensor) -> None:
        """Compile the kernels that prompts need and that graphs do not use."""
        size = self.embedding.shape[1]
        for layer in {type(layer.mlp): layer for layer in self.layers}.values():
            for num_rows in (MIN_EAGER_ROWS, 128):
                hidden = self.embedding.new_zeros((num_rows, size))
                if isinstance(layer.mlp, DenseMLP):
                    activated(layer.mlp, hidden, None, is_eager=True)
            self._finish_layer(
                layer, hidden, hidden.new_zeros((128, layer.output.shape[1])), is_eager=True
            )
            stored = self._project_qkv(layer, hidden, skipped=self._query_size(layer, pool))
            first = torch.zeros(128, dtype=torch.int32, device=pool.device)
            self._store(layer, stored, TokenSlots(first, first - 1), pool, 0)

    def min_torch_tokens(self, pool: Tensor) -> int | None:
        """Minimum length of a prompt without cached tokens for which torch's attention is used,
        because it is faster; None if it is not faster, or does not support a layer's
        variant."""
        if any(
            layer.variant.window is not None or not layer.variant.has_plain_scores
            for layer in self.layers
        ):
            return None
        if all(can_expand(layer.latent, pool) for layer in self.layers):
            return MIN_EXPANDED_TOKENS
        return MIN_TORCH_TOKENS if is_slower_than_torch(pool) else None

    def embed(self, tokens: Tensor, carry: Tensor, chosen: Tensor) -> Tensor:
        """The first hidden states. A token whose `carry` is not -1 is that entry of
        `chosen`."""
        return normed(self._embed(tokens, carry, chosen), self.scaling.embedding_norm)

    def _embed(self, tokens: Tensor, carry: Tensor, chosen: Tensor) -> Tensor:
        """Rows of the embedding, times its scale."""
        if self._split is None:
            return rows.embed(tokens, carry, chosen, self.embedding, self.scaling.embedding)
        carried = chosen.index_select(0, carry.clamp(min=0))
        local = torch.where(carry >= 0, carried, tokens) - self._split.start
        mine = (local >= 0) & (local < len(self.embedding))
        found = self.embedding.index_select(0, local.clamp(0, len(self.embedding) - 1))
        hidden = found * (mine * self.scaling.embedding).to(found.dtype)[:, None]
        return hidden if self._group is None else self._group.sum(hidden)

    def run(
        self,
        hidden: Tensor,
        places: TokenSlots,
        pool: Tensor,
        attend: Attend,
        *,
        wanted: RowsToCompute | None = None,
        expanded: int | None = None,
        is_eager: bool = False,
    ) -> Tensor:
        """All layers over `hidden`, `[tokens, size]`, which is overwritten; for all rows or
        only `wanted`. Tokens from `expanded` on are a prompt without cached tokens, whose
        latents are expanded. `is_eager` means that this is not part of a graph."""
        for number, layer in enumerate(self.layers):
            if wanted is not None and number == len(self.layers) - 1:
                return self._run_last(hidden, places, pool, wanted, is_eager=is_eager)
            packed = self._project_qkv(layer, hidden)
            self._store(layer, packed, places, pool, number)
            attended = self._attend(
                layer, packed, places.positions, number, attend,
                expanded=expanded, is_fp8=pool.element_size() == 1,
            )  # fmt: skip
            self._finish_layer(layer, hidden, attended, is_eager=is_eager)
        return hidden

    def _run_last(
        self,
        hidden: Tensor,
        places: TokenSlots,
        pool: Tensor,
        wanted: RowsToCompute,
        *,
        is_eager: bool,
    ) -> Tensor:
        """The last layer: K and V of all rows go to the pool; everything else is computed only
        for `wanted`."""
        number, layer = len(self.layers) - 1, self.layers[-1]
        stored = self._project_qkv(layer, hidden, skipped=self._query_size(layer, pool))
        self._store(layer, stored, places, pool, number)
        hidden = hidden.index_select(0, wanted.rows)
        if not len(hidden):
            return hidden
        packed = self._project_qkv(layer, hidden)
        positions = places.positions.index_select(0, wanted.rows)
        nowhere = torch.full_like(positions, -1)  # their K and V are already stored
        if layer.latent is None:
            self._store(layer, packed, TokenSlots(positions, nowhere), pool, number)
        attended = self._attend(layer, packed, positions, number, wanted.attend)
        self._finish_layer(layer, hidden, attended, is_eager=is_eager)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits of each row, in `out` if it is given."""
        if not len(hidden):
            return hidden
        if self._group is None:
            return self._own_logits(hidden, out)
        logits = self._group.join_columns(self._own_logits(hidden, None), self.vocab_size)
        return logits if out is None else out.copy_(logits)

    def _own_logits(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        """Logits of the vocabulary part of this rank."""
        logits = product(hidden, self.head, self.norm, out)
        if self._head_bias is not None:
            logits += self._head_bias
        if self.scaling.logits != 1.0:
            logits /= self.scaling.logits
        if self.scaling.softcap is not None:
            logits.div_(self.scaling.softcap).tanh_().mul_(self.scaling.softcap)
        return logits

    def _query_size(self, layer: FusedWeights, pool: Tensor) -> int:
        """Leading outputs of the first projection that belong to queries."""
        if layer.latent is not None:
            return layer.latent.query_size
        return int(self.heads * pool.shape[-1])

    def _store(
        self, layer: FusedWeights, packed: Tensor, places: TokenSlots, pool: Tensor, number: int
    ) -> None:
        """Store K and V, or latents, of `packed` in the pool; Q and K of `packed` are rotated
        in place."""
        if layer.latent is not None:
            layer.latent.store(packed, *places, layer.table, pool, number)
        else:
            rotate(packed, *places, layer.table, pool, number, layer.head_norms, layer.pairs)

    def _attend(
        self,
        layer: FusedWeights,
        packed: Tensor,
        positions: Tensor,
        number: int,
        attend: Attend,
        *,
        expanded: int | None = None,
        is_fp8: bool = False,
    ) -> Tensor:
        """Attention of each row, in the layout of the output projection. `is_fp8` means that
        the pool has 8-bit KV."""
        latent = layer.latent
        if latent is None:
            return attend(number, packed, layer.variant)
        if expanded is None:
            query = latent.queries(packed, positions, layer.table)
            return latent.by_head(attend(number, query, layer.variant))
        prompt = attend_prompt(
            latent, packed[expanded:], layer.table, layer.variant.scaling, is_fp8=is_fp8
        )
        if not expanded:
            return prompt
        others = self._attend(layer, packed[:expanded], positions[:expanded], number, attend)
        return torch.cat((others, prompt))

    def _project_qkv(self, layer: FusedWeights, hidden: Tensor, *, skipped: int = 0) -> Tensor:
        """Q, K and V of each row, without the first `skipped` outputs."""
        weight = rows_from(layer.qkv, skipped)
        bias = None if layer.qkv_bias is None else layer.qkv_bias[skipped:]
        if len(hidden) <= MAX_GEMM_ROWS:
            packed = product(hidden, weight, layer.input_norm, bias=bias)
        else:
            packed = hidden.new_empty((len(hidden), len(weight)))
            parts = zip(hidden.split(MAX_GEMM_ROWS), packed.split(MAX_GEMM_ROWS), strict=True)
            for part, out in parts:
                product(part, weight, layer.input_norm, out, bias)
        if layer.row_norms is not None:
            query, key, epsilon, _ = layer.row_norms
            at = len(query) - skipped
            if at:
                rows.norm_columns(packed[:, :at], query, epsilon)
            rows.norm_columns(packed[:, at : at + len(key)], key, epsilon)
        return packed

    def _finish_layer(
        self, layer: FusedWeights, hidden: Tensor, attended: Tensor, *, is_eager: bool
    ) -> None:
        """Everything after attention, added to `hidden` in place."""
        if layer.is_parallel:
            # Attention is computed already, so the MLP still finds the input of the layer.
            self._add_mlp(layer, hidden, is_eager=is_eager)
            self._add_attended(layer, hidden, attended)
        else:
            is_later = self._is_bias_added_later(layer, hidden)
            self._add_attended(layer, hidden, attended, is_biased=not is_later)
            later = layer.output_bias if is_later else None
            self._add_mlp(layer, hidden, later, is_eager=is_eager)

    def _is_bias_added_later(self, layer: FusedWeights, hidden: Tensor) -> bool:
        """Whether the norm before the experts adds the bias of the output projection. Otherwise
        the bias would take a kernel of its own where a product of several rows also adds to
        `hidden`."""
        return (
            isinstance(layer.mlp, MoeBlock)
            and isinstance(layer.mlp_norm, RmsNorm)
            and layer.output_bias is not None
            and layer.attention_norm is None
            and layer.output_norm is None
            and layer.residual_scale == 1.0
            and self._ranks is None
            and len(hidden) > 1
        )

    def _add_attended(
        self, layer: FusedWeights, hidden: Tensor, attended: Tensor, *, is_biased: bool = True
    ) -> None:
        """Add the projection of attention to `hidden`. Before, `hidden` is the input of the
        layer, which the gate of attention reads."""
        bias = layer.output_bias if is_biased else None
        parts = zip(hidden.split(MAX_GEMM_ROWS), attended.split(MAX_GEMM_ROWS), strict=True)
        for part, attended_part in parts:
            if layer.output_gate is not None:
                attended_part *= product(part, layer.output_gate, layer.input_norm).sigmoid_()
            add_linear(
                part, attended_part, layer.output, bias, layer.attention_norm,
                layer.residual_scale, self._ranks,
            )  # fmt: skip

    def _add_mlp(
        self,
        layer: FusedWeights,
        hidden: Tensor,
        added: Tensor | None = None,
        *,
        is_eager: bool,
    ) -> None:
        """Add the result of the MLP to `hidden`; first, `added` to each row."""
        if isinstance(layer.mlp, DenseMLP):
            add_dense(
                layer.mlp,
                hidden,
                norm=layer.mlp_norm,
                output_norm=layer.output_norm,
                scale=layer.residual_scale,
                is_eager=is_eager,
                ranks=self._ranks,
            )
            return
        norm = cast(RmsNorm | None, layer.mlp_norm)
        add_moe(
            layer.mlp, hidden, norm, layer.output_norm, is_eager=is_eager, ranks=self._ranks,
            added=added,
        )  # fmt: skip
