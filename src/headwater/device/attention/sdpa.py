"""The CPU reference: a step's attention in plain torch.

A packed batch has two kinds of rows. Decodes in buffers are attended together. The other rows
are attended in one compiled call if it supports them (`prefill`), otherwise one by one. K and V
of these other rows are written to the pool in each layer, because they are read from there. K
and V of decodes in buffers are written once, after the last layer.
"""

from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.attention.batched import BatchedDecodes
from headwater.device.attention.chunk import ChunkRow
from headwater.device.attention.prefill import prefill_step
from headwater.device.kv import KVPool


class SdpaStep:
    """The `AttentionStep` of one packed batch."""

    def __init__(
        self,
        pool: KVPool,
        *,
        pool_rows: Tensor,
        chunks: list[ChunkRow],
        chunk_tokens: Tensor,
        decodes: BatchedDecodes | None,
        decode_tokens: Tensor,
    ) -> None:
        self._pool = pool
        self._chunks = chunks
        self._prefill = prefill_step(pool, chunks)
        self._decodes = decodes
        self._chunk_tokens = chunk_tokens
        self._chunk_rows = pool_rows.index_select(2, chunk_tokens) if chunks else pool_rows
        self._decode_rows = pool_rows.index_select(2, decode_tokens) if decodes else pool_rows

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """See `AttentionStep`. Tokens that only pad the batch get zeros."""
        # Attend over the values as the pool will return them, so that a cached prefix gives the
        # same result.
        key, value = self._pool.rounded(key), self._pool.rounded(value)
        decodes = self._decodes
        if decodes is not None and not self._chunks and decodes.fills(query.shape[0]):
            return decodes.attend(layer, query, key, value, variant)
        out = query.new_zeros(query.shape)
        if decodes is not None:
            decodes.place(out, decodes.attend(layer, query, key, value, variant))
        if self._chunks:
            self._pool.write(self._chunk_rows[layer], self._chunk_tokens, key, value)
        if self._prefill is not None and self._prefill.can_attend(variant):
            self._prefill.attend(layer, query, out, variant.scaling)
            return out
        for row in self._chunks:
            mine = slice(row.start, row.end)
            seen = key[mine], value[mine]
            out[mine] = row.attend(self._pool, layer, query[mine], seen, variant)
        return out

    def finish(self) -> None:
        """Write the new K and V of the buffers to the pool, after the last layer."""
        if self._decodes is not None:
            self._decodes.store(self._decode_rows)
