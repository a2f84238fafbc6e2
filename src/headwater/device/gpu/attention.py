"""Attention of a step on the GPU: decodes and chunks, each with the best kernel for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from headwater.device.attention.base import Variant
from headwater.device.fp8_kv import quantize
from headwater.device.kernels.decode import attend_decodes
from headwater.device.kernels.pieces import DecodeWork
from headwater.device.kernels.prefill import attend_chunks
from headwater.device.kernels.tiles import ChunkWork

_WHOLE_UNIT = 1024
"""Prompts attended as a whole are padded to a multiple of this, because cuDNN takes about 60 ms
to plan a new length."""

MIN_TORCH_TOKENS = 4096
"""Shorter prompts are attended over the pool, because cuDNN's gain is not worth a plan
there."""


class WholePrompt(NamedTuple):
    """A row that is computed from its first token on, so it reads no cached KV."""

    start: int
    """Position of its tokens in the packed batch."""

    num_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class PagedAttention:
    """What all layers of one step share."""

    pool: Tensor
    heads: int
    value_dim: int
    """Elements of a head's value, and so of its result."""

    num_decodes: int = 0
    """Number of leading rows with one token each; `decodes` is for these."""

    decodes: DecodeWork | None = None
    chunks: ChunkWork | None = None
    whole: WholePrompt | None = None
    """The last row, when it is long, has no cached prefix and is faster with torch's kernel.
    Then `chunks` is for the other rows."""

    sampled: DecodeWork | None = None
    """The rows that are sampled, one token each. Only these attend in the last layer."""

    gate: Callable[[int], None] | None = None
    """Called with each layer before it attends: makes the device wait for the KV that the layer
    reads."""

    def attend(self, layer: int, packed: Tensor, variant: Variant) -> Tensor:
        """`[tokens, heads * dim]`, from packed Q, K and V; K and V are already in the pool."""
        if self.gate is not None:
            self.gate(layer)
        shape = len(packed), self.heads, self.value_dim
        out = torch.empty(shape, dtype=packed.dtype, device=packed.device)
        if self.decodes is not None:
            mine = slice(0, self.num_decodes)
            attend_decodes(packed[mine], self.pool, layer, self.decodes, variant, out[mine])
        if self.chunks is not None:
            attend_chunks(packed, self.pool, layer, self.chunks, variant, out)
        if self.whole is not None:
            out[self.whole.start :] = self._attend_whole(self.whole, packed, variant)
        return out.view(len(packed), -1)

    def attend_sampled(self, layer: int, packed: Tensor, variant: Variant) -> Tensor:
        """Attention of `sampled` alone; `packed` has the tokens of these rows and no others."""
        assert self.sampled is not None, "nothing is sampled"
        if self.gate is not None:
            self.gate(layer)
        shape = len(packed), self.heads, self.value_dim
        out = torch.empty(shape, dtype=packed.dtype, device=packed.device)
        attend_decodes(packed, self.pool, layer, self.sampled, variant, out)
        return out.view(len(packed), -1)

    def _attend_whole(self, whole: WholePrompt, packed: Tensor, variant: Variant) -> Tensor:
        """Causal attention, so that real tokens do not see the padding at the end."""
        kv_heads, dim = self.pool.shape[4:]
        mine = pad(packed[whole.start :], (0, 0, 0, -whole.num_tokens % _WHOLE_UNIT))
        split = mine.view(len(mine), -1, dim).transpose(0, 1)[None]
        query, key, value = split.split((self.heads, kv_heads, kv_heads), dim=1)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            out = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=variant.scaling, enable_gqa=True
            )
        return out[0].transpose(0, 1)[: whole.num_tokens]


@dataclass(slots=True, kw_only=True, eq=False)
class PagedStep:
    """The `AttentionStep` of a model in transformers' own code."""

    attention: PagedAttention
    positions: Tensor
    slots: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """See `AttentionStep`."""
        pool = self.attention.pool
        if pool.element_size() == 1:
            self._store_fp8(layer, key, value)
        else:
            self._store(layer, key, value)
        packed = query.reshape(len(query), -1)
        return self.attention.attend(layer, packed, variant).view(*query.shape[:2], -1)

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        pool = self.attention.pool
        num_planes, block_tokens, kv_heads, dim = pool.shape[2:]
        planes = (self.slots.long() * pool.shape[1] + layer) * num_planes
        rows = planes * block_tokens + self.positions % block_tokens
        flat = pool.view(-1, kv_heads * dim)
        for plane, source in enumerate((key, value)[:num_planes]):
            flat.index_copy_(0, rows + plane * block_tokens, source.reshape(len(rows), -1))

    def _store_fp8(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store K and V in the format of `Fp8KVPool`: scales follow the elements of a layer."""
        pool = self.attention.pool
        num_planes, block_tokens, kv_heads, dim = pool.shape[2:]
        codes = pool.view(torch.uint8)
        scales = codes.as_strided(
            (*pool.shape[:2], num_planes, block_tokens, kv_heads),
            (pool.stride(0), pool.stride(1), block_tokens * kv_heads, kv_heads, 1),
            num_planes * block_tokens * kv_heads * dim,
        )
        slots, offsets = self.slots.long(), self.positions.long() % block_tokens
        for plane, heads in enumerate((key, value)[:num_planes]):
            numbers, exponents = quantize(heads)
            codes[slots, layer, plane, offsets] = numbers.view(torch.uint8)
            scales[slots, layer, plane, offsets] = exponents
