"""Multi-head latent attention (MLA): the KV of a token is one latent vector for all heads.

A block stores `[latent | rotary key]` of each token, `kv_lora_rank + qk_rope_head_dim` numbers in
one plane. The projection that expands a latent to keys and values of every head is absorbed
into the query and the output, so that heads attend over the stored vectors themselves:

    q . (W_k latent)  =  (W_k^T q) . latent            sum of w (W_v latent)  =  W_v (sum of w latent)

This is attention with one KV head whose keys are the stored vectors, and whose values are the
leading `kv_lora_rank` numbers of them.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn


class LatentProjection(nn.Module):
    """The weight of a layer's `kv_b_proj`, for absorbed attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        parts: Any = attention
        self.weight: nn.Parameter = parts.kv_b_proj.weight
        self.rank = int(parts.kv_lora_rank)
        self.key_dim = int(parts.qk_nope_head_dim)
        """Elements of a head's key that are not rotated."""

        self.value_dim = int(parts.v_head_dim)

    def by_head(self) -> tuple[Tensor, Tensor]:
        """The key and value parts of the weight, `[heads, key_dim or value_dim, rank]`."""
        weight = self.weight.view(-1, self.key_dim + self.value_dim, self.rank)
        return weight[:, : self.key_dim], weight[:, self.key_dim :]

    def absorb(self, query: Tensor) -> Tensor:
        """Queries over stored vectors, `[tokens, heads, rank + rotated]`, from the queries of a
        layer."""
        plain, rotated = query.tensor_split((self.key_dim,), dim=-1)
        keys, _ = self.by_head()
        return torch.cat((torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1), rotated), -1)

    def values(self, attended: Tensor) -> Tensor:
        """`[tokens, heads, value_dim]`, from the attended stored vectors."""
        _, values = self.by_head()
        latents = attended[..., : self.rank].transpose(0, 1)
        return torch.bmm(latents, values.transpose(1, 2)).transpose(0, 1)


def use_latents(module: nn.Module) -> None:
    """Let every layer of an MLA model attend over latents, in place.

    The model code calls `expand_kv` between the latent and attention. It is replaced by a
    function that passes the stored latent on.
    """
    for attention in module.modules():
        if hasattr(attention, "expand_kv"):
            attention.latent = LatentProjection(attention)
            del attention.kv_b_proj
            attention.expand_kv = cast(Any, _stored)


def _stored(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Latent and rotated key side by side, as a block stores them, `[1, 1, tokens, rank +
    rotated]`."""
    both = torch.cat((latent, rotated), dim=-1)
    return both, both
