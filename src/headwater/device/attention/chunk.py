"""Attention of one row by itself: a chunk of a prompt, with or without a cached prefix.

positions   0 ............ first ........ context
            |  in the pool  |  this step   |
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.kv import KVPool

_PART = 64
_MIN_TOKENS = 16
"""Tokens per part, and the prompt length from which parts are used (measured)."""

_QUERIES = 256
"""Queries per product when the scores are materialised; it bounds their memory."""


class VisibleBlocks(NamedTuple):
    """The blocks that a row reads under one window, and what each query sees of them."""

    first_block: int
    mask: Tensor | None
    """Added to scores, `[queries, keys]`; None if no key is hidden, or if `causal` already
    hides the later ones."""

    causal: bool


class ChunkRow:
    """One row of the packed batch, tokens `[start, end)`."""

    def __init__(self, *, start: int, end: int, context: int, slots: Tensor) -> None:
        self.start, self.end, self.context = start, end, context
        self.first = context - (end - start)
        self.slots = slots
        self._visible: dict[int | None, VisibleBlocks] = {}

    def attend(
        self,
        pool: KVPool,
        layer: int,
        query: Tensor,
        own: tuple[Tensor, Tensor],
        variant: Variant,
    ) -> Tensor:
        """`[tokens, heads, head_dim]`. This step's K and V, `own`, are already in the pool.

        A row without a prefix does not read the pool: it uses `own` directly.
        """
        if (
            variant.has_plain_scores
            and self._sees_all(variant.window)
            and len(query) >= _MIN_TOKENS
        ):
            keys, values = own if self.first == 0 else self._read(pool, layer, 0)
            return _in_parts(pool, query, keys, values, variant.scaling)
        visible = self._visible_blocks(variant.window, query, pool.block_tokens)
        keys, values = own if self.first == 0 else self._read(pool, layer, visible.first_block)
        if variant.has_plain_scores:
            return _fused(query, keys, values, visible, variant.scaling)
        parts = torch.split(query, _QUERIES)
        masks = self._mask(variant.window, query, visible.first_block * pool.block_tokens)
        out = [
            _written_out(q, keys, values, m, variant)
            for q, m in zip(parts, torch.split(masks, _QUERIES), strict=True)
        ]
        return torch.cat(out)

    def _sees_all(self, window: int | None) -> bool:
        return window is None or window >= self.context

    def _read(self, pool: KVPool, layer: int, first_block: int) -> tuple[Tensor, Tensor]:
        keys, values = pool.read(self.slots[first_block:], layer)
        seen = self.context - first_block * pool.block_tokens
        return keys[:seen], values[:seen]

    def _visible_blocks(
        self, window: int | None, query: Tensor, block_tokens: int
    ) -> VisibleBlocks:
        """The visible blocks; created by the first layer with this window and kept for the
        other layers of the step."""
        visible = self._visible.get(window)
        if visible is None:
            visible = self._look(window, query, block_tokens)
            self._visible[window] = visible
        return visible

    def _look(self, window: int | None, query: Tensor, block_tokens: int) -> VisibleBlocks:
        hidden = 0 if window is None else max(0, self.first - window + 1)
        first_block = hidden // block_tokens if self.first else 0
        seen = self.context - first_block * block_tokens
        if window is None or window >= seen:
            if self.first == 0:
                return VisibleBlocks(first_block, None, self.context > 1)
            if self.end - self.start == 1:
                return VisibleBlocks(first_block, None, False)
        return VisibleBlocks(
            first_block, self._mask(window, query, first_block * block_tokens), False
        )

    def _mask(self, window: int | None, query: Tensor, start: int) -> Tensor:
        device = query.device
        at = torch.arange(self.first, self.context, device=device)[:, None]
        keys = torch.arange(start, self.context, device=device)
        hidden = keys > at
        if window is not None:
            hidden |= keys <= at - window
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf"))


def _written_out(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, variant: Variant
) -> Tensor:
    """Attention with materialised scores, for variants that the fused kernel does not
    support."""
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = grouped.reshape(kv_heads, -1, head_dim) @ keys.permute(1, 2, 0)
    scores = scores.view(heads, tokens, -1).float() * variant.scaling
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    weights = softmax_with_sinks(scores + mask, variant.sinks).to(query.dtype)
    out = weights.view(kv_heads, -1, weights.shape[-1]) @ values.transpose(0, 1)
    return out.view(heads, tokens, head_dim).transpose(0, 1)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys of `[heads, queries, keys]`. A sink takes part and is then dropped."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def _in_parts(
    pool: KVPool, query: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> Tensor:
    """Attention of the last tokens of a prompt in parts; all heads of a KV head are one
    product.

    A part uses only the keys that its queries see, and needs no mask. A CPU's fused kernel
    takes 1.3 times as long for 544 tokens, and the same time for 32 tokens after 512.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    before = len(keys) - tokens
    by_head, values = keys.permute(1, 2, 0), values.transpose(0, 1)
    out = query.new_empty(query.shape)
    for start in range(0, tokens, _PART):
        end = min(start + _PART, tokens)
        part = query[start:end].reshape(end - start, kv_heads, -1, head_dim) * scaling
        grouped = part.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        scores = torch.bmm(grouped, by_head[:, :, : before + end])
        by_query = scores.view(heads, end - start, -1)
        pool.ops.causal_softmax(by_query, before + start + 1)
        attended = torch.bmm(scores, values[:, : before + end])
        by_token = attended.view(heads, end - start, head_dim).transpose(0, 1)
        out[start:end] = by_token
    return out


def _fused(
    query: Tensor, keys: Tensor, values: Tensor, visible: VisibleBlocks, scaling: float
) -> Tensor:
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=visible.mask,
        is_causal=visible.causal,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)
