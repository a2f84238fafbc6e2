"""The attention of a decoder layer with latent KV (MLA), as the fused decoder computes it.

hidden -> | query | latent, rotated key |      one GEMM; a query of low rank has a second one
query  -> absorbed by head into the space of latents, its rotated part beside it
attended latents -> values by head -> output projection
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.device.gpu.mlp import RmsNorm
from headwater.device.kernels import rows
from headwater.device.kernels.gemv import fits, gemv
from headwater.device.kernels.heads import absorb, by_head
from headwater.device.kernels.latent_store import store_latents
from headwater.device.kernels.rotary import RotaryPairs

RotaryTable = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentWeights:
    """The weights between the first projection of a layer and its output projection."""

    query_size: int
    """Leading outputs of the first projection: the query, or its low-rank form."""

    query_norm: RmsNorm | None
    query: Tensor | None
    """The second projection of a low-rank query."""

    latent_norm: RmsNorm
    keys: Tensor
    """`[heads, plain, rank]`: absorbs the part of queries that is not rotated."""

    values: Tensor
    """`[heads, rank, value_dim]`."""

    pairs: RotaryPairs

    def store(
        self,
        packed: Tensor,
        positions: Tensor,
        slots: Tensor,
        table: RotaryTable,
        pool: Tensor,
        layer: int,
    ) -> None:
        """Store latents and rotated keys, the last outputs of the first projection."""
        size = pool.shape[-1]
        store_latents(
            packed[:, packed.shape[1] - size :],
            positions, slots, self.latent_norm, table, pool, layer, self.pairs,
        )  # fmt: skip

    def queries(self, packed: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
        """`[tokens, heads * (rank + rotated)]`, absorbed; `packed` is overwritten."""
        plain = self.plain_queries(packed[:, : self.query_size])
        heads, _, rank = self.keys.shape
        shape = len(plain), heads, rank + 2 * table[0].shape[1]
        query = torch.empty(shape, dtype=plain.dtype, device=plain.device)
        absorb(plain, self.keys, positions, table, query, self.pairs)
        return query.view(len(plain), -1)

    def by_head(self, attended: Tensor) -> Tensor:
        """`[tokens, heads * value_dim]`, from attended latents `[tokens, heads * rank]`."""
        heads, rank, value_dim = self.values.shape
        tokens = len(attended)
        out = attended.new_empty((tokens, heads, value_dim))
        by_head(attended.view(tokens, heads, rank), self.values, out)
        return out.view(tokens, -1)

    def plain_queries(self, packed: Tensor) -> Tensor:
        """`[tokens, heads * (key_dim + rotated)]`, not absorbed and not rotated."""
        if self.query is None:
            return packed
        if fits(self.query, len(packed)):
            return gemv(packed, self.query, norm=self.query_norm)
        if self.query_norm is not None:
            rows.norm_columns(packed, *self.query_norm)
        return torch.mm(packed, self.query.T)


def latent_parts(attention: nn.Module) -> list[nn.Linear] | None:
    """The linear layers of a layer's first projection; None if KV is not latent."""
    parts: Any = attention
    if not hasattr(attention, "latent"):
        return None
    first = parts.q_proj if parts.q_lora_rank is None else parts.q_a_proj
    return [first, parts.kv_a_proj_with_mqa]


def latent_weights(
    attention: nn.Module, query_norm: RmsNorm | None, latent_norm: RmsNorm | None
) -> LatentWeights | None:
    """The weights of a layer with latent KV; None if it has unknown parts."""
    parts: Any = attention
    first = latent_parts(attention)
    is_low_rank = parts.q_lora_rank is not None
    if first is None or latent_norm is None or (is_low_rank and query_norm is None):
        return None
    if is_low_rank and parts.q_b_proj.bias is not None:
        return None
    keys, values = parts.latent.by_head()
    return LatentWeights(
        query_size=first[0].out_features,
        query_norm=query_norm,
        query=parts.q_b_proj.weight.data if is_low_rank else None,
        latent_norm=latent_norm,
        keys=keys.data,
        values=values.data.transpose(1, 2),
        pairs=_pairs(parts.config),
    )


def _pairs(config: Any) -> RotaryPairs:  # noqa: ANN401 - a configuration of transformers'
    """Which elements the family rotates together; `fused_check` compares the results."""
    if config.model_type == "deepseek_v2":
        return RotaryPairs.NEIGHBOURS
    if getattr(config, "rope_interleave", False):
        return RotaryPairs.NEIGHBOURS_TO_HALVES
    return RotaryPairs.HALVES
