"""Compiles kernels at start, so that no prompt waits for a compiler."""

import torch

from headwater.device.attention.base import Variant
from headwater.device.gpu.inputs import partials
from headwater.device.gpu.work import MAX_PARTS, PART_STEP
from headwater.device.kernels.prefill import attend_chunks, has_hopper_kernel
from headwater.device.kernels.tiles import LARGE_TILE, ChunkWork, tile_queries
from headwater.device.kv import KVPool


def warm_chunks(pool: KVPool, heads: int, variant: Variant) -> None:
    """Compile attention of chunks for every tile size, number of parts, and for many tiles."""
    packed = torch.zeros(
        (1, (heads + 2 * pool.kv_heads) * pool.head_dim),
        dtype=pool.dtype,
        device=pool.device,
    )
    out = packed.new_empty((1, heads, pool.value_dim))
    sizes = {tile_queries(pool.dtype, pool.head_dim, longest) for longest in (1, 1 << 20)}
    for tile in sizes:
        num_parts = 1
        while num_parts <= MAX_PARTS:
            attend_chunks(
                packed, pool.data, 0, chunk_work(pool, heads, tile, num_parts), variant, out
            )
            num_parts *= 2
    if has_hopper_kernel(pool.data, pool.dtype):
        many = chunk_work(pool, heads, LARGE_TILE, 1)
        many.end_entry = 1
        many.use_hopper = True
        attend_chunks(packed, pool.data, 0, many, variant, out)


def chunk_work(
    pool: KVPool, heads: int, tile: int, num_parts: int, *, count: int = 1, context: int = 1
) -> ChunkWork:
    """The work of `count` queries at the end of a context in the first slots, in one tile."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=pool.device)

    partial, partial_lse = partials(num_parts * tile, heads, pool)
    return ChunkWork(
        contexts=ints(context),
        query_start=ints(0, count),
        tables=ints(*range(-(-context // pool.block_tokens))),
        table_start=ints(0),
        tile=tile,
        tile_row=ints(0),
        tile_start=ints(0),
        longest_context=context,
        num_parts=num_parts,
        part_keys=ints(-(-context // (num_parts * PART_STEP)) * PART_STEP),
        partial=partial,
        partial_lse=partial_lse,
    )
