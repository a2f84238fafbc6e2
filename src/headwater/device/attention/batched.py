"""Attention of many decode rows together: one batched product over their buffers.

Indices and masks are made once per step; each layer only multiplies.
"""

import numpy as np
import torch
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.attention.chunk import softmax_with_sinks
from headwater.device.attention.shared import attend_shared
from headwater.device.contiguous_kv import ContiguousKV
from headwater.device.host_ops import host_ops
from headwater.device.kv import Ints, KVPool
from headwater.device.spans import SpanLengths


class BatchedDecodes:
    """The decode rows of one step, in buffers `[0, end)`; a buffer among these without a row is
    idle."""

    def __init__(
        self,
        pool: KVPool,
        storage: ContiguousKV,
        *,
        buffers: Ints,
        end: int,
        contexts: Ints,
        tokens: Ints,
        shared: int = 0,
    ) -> None:
        self._pool = pool
        self._ops = host_ops(pool.device, pool.dtype)
        self._shared = shared
        self._storage = storage
        self._keys, self._values = storage.keys, storage.values
        self._buffer_tokens = storage.buffer_tokens
        self._num_buffers = storage.num_buffers
        self._end = end
        self._span = int(contexts.max())
        self._contexts, self._buffers = contexts, buffers
        self._masks: dict[int | None, Tensor | None] = {}
        in_order = end == len(buffers) and bool((buffers == np.arange(end)).all())
        self._index(in_order, tokens)

    def _index(self, in_order: bool, tokens: Ints) -> None:
        """Compute the indices of each buffer's token and position. Idle buffers get the first
        token, which is harmless."""
        pool = self._pool
        token_of = np.full(self._end, tokens[0], dtype=np.int64)
        token_of[self._buffers] = tokens
        at = np.zeros(self._end, dtype=np.int64)
        at[self._buffers] = self._contexts - 1
        heads = np.arange(self._end * pool.kv_heads)
        rows = heads * self._buffer_tokens + np.repeat(at, pool.kv_heads)
        leading = in_order and bool((tokens == np.arange(len(tokens))).all())
        self.leading = leading
        """The rows are the first tokens of the batch, in the order of their buffers."""
        self._rows = torch.from_numpy(rows).to(pool.device)
        self._token_of = torch.from_numpy(token_of).to(pool.device)
        self._tokens = torch.from_numpy(tokens).to(pool.device)
        self._buffer_rows = torch.from_numpy(self._buffers).to(pool.device)
        lengths = torch.from_numpy(np.maximum(at + 1 - self._shared, 1)).to(pool.device)
        self._spans = SpanLengths(
            lengths, width=self._span - self._shared, kv_heads=pool.kv_heads
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """`[end, heads, head_dim]`, by buffer. It adds this step's K and V to the buffers."""
        pool = self._pool
        keys, values = self._keys[layer], self._values[layer]
        for source, target in ((key, keys), (value, values))[: pool.planes]:
            self._ops.scatter(
                source, self._token_of, self._rows, target.view(-1, pool.head_dim)
            )
        query = self._by_buffer(query)
        used = self._end * pool.kv_heads
        keys, values = keys[:, : self._span], values[:, : self._span]
        if variant.window is None and variant.has_plain_scores:
            out = self._plain(query, keys, values, variant.scaling)
        else:
            if self._shared:
                self._storage.complete(self._buffers)
            out = torch.bmm(self._weights(query, keys[:used], variant), values[:used])
        return out.view(self._end, -1, pool.head_dim)

    def _plain(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        kv_heads, used = self._pool.kv_heads, self._end * self._pool.kv_heads
        first = slice(int(self._buffers[0]) * kv_heads, (int(self._buffers[0]) + 1) * kv_heads)
        at = self._shared
        return attend_shared(
            self._ops,
            query.reshape(used, -1, self._pool.head_dim) * scaling,
            (keys[first, :at], values[first, :at]),
            (keys[:used, at:], values[:used, at:]),
            self._spans,
        )

    def fills(self, num_tokens: int) -> bool:
        """Whether `attend` returns the results of all tokens of the batch, in their order."""
        return self.leading and self._end == num_tokens

    def place(self, out: Tensor, attended: Tensor) -> None:
        """Copy the result of `attend` to the rows' tokens in the packed batch."""
        if self.leading:
            out[: self._end] = attended
        else:
            out.index_copy_(0, self._tokens, attended.index_select(0, self._buffer_rows))

    def store(self, rows: Tensor) -> None:
        """Write this step's K and V of all layers to pool `rows`, after the last layer."""
        pool = self._pool
        heads = torch.arange(pool.kv_heads, device=pool.device)
        buffer_heads = (self._buffer_rows[:, None] * pool.kv_heads + heads).flatten()
        layers = torch.arange(pool.num_layers, device=pool.device)[:, None]
        stride = self._num_buffers * pool.kv_heads * self._buffer_tokens
        source = (layers * stride + self._rows.index_select(0, buffer_heads)).flatten()
        keys = self._keys.view(-1, pool.head_dim).index_select(0, source)
        values = self._values.view(-1, pool.head_dim).index_select(0, source)
        pool.write_heads(rows, keys, values)

    def _by_buffer(self, tokens: Tensor) -> Tensor:
        return tokens[: self._end] if self.leading else tokens.index_select(0, self._token_of)

    def _weights(self, query: Tensor, keys: Tensor, variant: Variant) -> Tensor:
        """Softmax of scores, `[buffers * kv_heads, queries per head, keys]`."""
        grouped = query.reshape(keys.shape[0], -1, keys.shape[2])
        mask = self._mask(variant.window, query.dtype)
        scores = torch.bmm(grouped, keys.transpose(1, 2)).float() * variant.scaling
        if variant.softcap is not None:
            scores = torch.tanh(scores / variant.softcap) * variant.softcap
        if mask is not None:
            scores = scores + mask
        if variant.sinks is not None:
            sinks = variant.sinks.repeat(self._end)
            by_head = scores.view(len(sinks), 1, -1)
            return softmax_with_sinks(by_head, sinks).reshape(scores.shape).to(query.dtype)
        return scores.softmax(-1).to(query.dtype)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """The mask that is added to scores, `[buffers * kv_heads, 1, keys]`; created by the
        first layer that needs it."""
        if window not in self._masks:
            self._masks[window] = self._look(window, dtype)
        return self._masks[window]

    def _look(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        contexts = np.full(self._end, self._span, dtype=np.int64)
        contexts[self._buffers] = self._contexts
        keys = np.arange(self._span)
        hidden = keys >= contexts[:, None]
        if window is not None:
            hidden |= keys < contexts[:, None] - window
        if not hidden.any():
            return None
        mask = torch.zeros(hidden.shape, dtype=dtype)
        mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
        by_head = mask.repeat_interleave(self._pool.kv_heads, dim=0)
        return by_head[:, None].to(self._pool.device)
