"""Attention over latent KV (MLA): one stored vector per token, for all heads.

    a query, a key     | latent ........ LATENT | rotated .. ROTATED |
    a value            | latent ........ LATENT |

Queries are absorbed already (`device.latent`), so this is attention with one KV head. A tile of
latents is read once, and used as keys and as values. In a pool of 8-bit KV both parts share a scale,
which follows the elements of the layer (`fp8_kv`).
"""

import triton
import triton.language as tl
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.fp8 import power_of_two
from headwater.device.kernels.pieces import DecodeWork
from headwater.device.kernels.tiles import ChunkWork

_MAX_DECODE_HEADS = 32
_MAX_CHUNK_QUERIES = 32
"""Maximum number of queries that one program computes together: heads of one token, or tokens
of one head. With 64, Triton keeps the queries in registers and spills."""


@triton.jit
def _keys_seen(q, q_rotated, highest, total, summed, begin, end, query_at, pool, table,
               block_stride, layer_at, scale, LATENT: tl.constexpr,
               LATENT_WIDTH: tl.constexpr, ROTATED: tl.constexpr, ROTATED_WIDTH: tl.constexpr,
               BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
               EXACT: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Attend to keys `[begin, end)`; with `CAUSAL`, each query attends only to keys up to its
    own position."""
    at = tl.arange(0, LATENT_WIDTH)
    rotated_at = tl.arange(0, ROTATED_WIDTH)
    size: tl.constexpr = LATENT + ROTATED
    is_fp8: tl.constexpr = pool.dtype.element_ty == tl.float8e4nv
    scales = pool.to(tl.pointer_type(tl.uint8)) + BLOCK_TOKENS * size
    # Slots are read one iteration ahead: a load that depends on a slot read in the same
    # iteration is not pipelined. Neither are loads of single bytes.
    slot = tl.load(table + begin // BLOCK_TOKENS, mask=begin < end, other=0).to(tl.int64)
    if is_fp8 and BLOCK_TOKENS % KEYS == 0:
        following = _exponents(
            scales + layer_at, slot * block_stride, begin, end, BLOCK_TOKENS, KEYS
        )
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = first + tl.arange(0, KEYS)
        seen = key < end
        if BLOCK_TOKENS % KEYS == 0:
            place = slot * block_stride + layer_at + (key % BLOCK_TOKENS) * size
            after = tl.minimum(first + KEYS, end - 1)
            slot = tl.load(table + after // BLOCK_TOKENS).to(tl.int64)
        else:
            slots = tl.load(table + key // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
            place = slots * block_stride + layer_at + (key % BLOCK_TOKENS) * size
        inside = seen[:, None] & (at < LATENT)[None, :]
        latent = tl.load(pool + place[:, None] + at[None, :], mask=inside, other=0.0)
        inside = seen[:, None] & (rotated_at < ROTATED)[None, :]
        rotated = tl.load(
            pool + place[:, None] + LATENT + rotated_at[None, :], mask=inside, other=0.0
        )
        if is_fp8:
            latent, rotated = latent.to(q.dtype), rotated.to(q.dtype)
            if BLOCK_TOKENS % KEYS == 0:
                exponent = following
                following = _exponents(
                    scales + layer_at,
                    slot * block_stride,
                    first + KEYS,
                    end,
                    BLOCK_TOKENS,
                    KEYS,
                )
            else:
                exponent = _exponents(
                    scales + layer_at, slots * block_stride, first, end, BLOCK_TOKENS, KEYS
                )
        if EXACT:
            scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
            scores = tl.dot(q_rotated, tl.trans(rotated), scores, input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(latent))
            scores = tl.dot(q_rotated, tl.trans(rotated), scores)
        if is_fp8:
            scores = scores * power_of_two(exponent)[None, :]
        visible = seen[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= query_at[:, None])
        scores = tl.where(visible, scores * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # If nothing was seen yet, the maximum is -infinity, and -infinity minus itself is NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        summed = summed * decay[:, None]
        if is_fp8:
            # Scales relative to the largest one of the tile: float16 could not represent very
            # small scales.
            top = tl.max(exponent, 0)
            weights = weights * tl.exp2((exponent - top).to(tl.float32))[None, :]
            if EXACT:
                part = tl.dot(weights, latent, input_precision="ieee")
            else:
                part = tl.dot(weights.to(latent.dtype), latent)
            summed += part * power_of_two(top)
        elif EXACT:
            summed = tl.dot(weights, latent, summed, input_precision="ieee")
        else:
            summed = tl.dot(weights.to(latent.dtype), latent, summed)
        highest = higher
    return highest, total, summed


@triton.jit
def _exponents(scales, block_at, first, end, BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr):
    """Exponents of the scales of the keys from `first` on."""
    key = first + tl.arange(0, KEYS)
    found = tl.load(scales + block_at + key % BLOCK_TOKENS, mask=key < end, other=1)
    return found.to(tl.int32)


@triton.jit
def _attend_decodes(query, pool, contexts, tables, table_start, piece, work_row, work_start,
                    row_work, partial, partial_lse, out, block_stride, layer_at, scale,
                    HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_WIDTH: tl.constexpr,
                    ROTATED: tl.constexpr, ROTATED_WIDTH: tl.constexpr,
                    BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
                    EXACT: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    item = tl.program_id(1)
    row = tl.load(work_row + item)
    is_used = row >= 0
    row = tl.maximum(row, 0)
    start = tl.load(work_start + item)
    end = tl.minimum(start + tl.load(piece), tl.load(contexts + row))
    table = tables + tl.load(table_start + row)
    is_whole = tl.load(row_work + row + 1) - tl.load(row_work + row) == 1
    start_early(EARLY)
    if not is_used:
        return
    head = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    known = head < HEADS
    at = tl.arange(0, LATENT_WIDTH)
    rotated_at = tl.arange(0, ROTATED_WIDTH)
    mine = query + (row.to(tl.int64) * HEADS + head) * (LATENT + ROTATED)
    wanted = known[:, None] & (at < LATENT)[None, :]
    q = tl.load(mine[:, None] + at[None, :], mask=wanted, other=0.0)
    q_rotated = tl.load(
        mine[:, None] + LATENT + rotated_at[None, :],
        mask=known[:, None] & (rotated_at < ROTATED)[None, :],
        other=0.0,
    )
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, LATENT_WIDTH], tl.float32)
    highest, total, summed = _keys_seen(
        q, q_rotated, highest, total, summed, start, end, head, pool, table, block_stride,
        layer_at, scale, LATENT, LATENT_WIDTH, ROTATED, ROTATED_WIDTH, BLOCK_TOKENS, KEYS,
        False, EXACT, STAGES,
    )  # fmt: skip
    result = summed / tl.where(total == 0, 1.0, total)[:, None]
    if is_whole:
        done = (row.to(tl.int64) * HEADS + head) * LATENT
        tl.store(out + done[:, None] + at[None, :], result, mask=wanted)
    else:
        part = item.to(tl.int64) * HEADS + head
        tl.store(partial + part[:, None] * LATENT + at[None, :], result, mask=wanted)
        level = tl.where(total == 0, float("-inf"), highest + tl.log2(total))
        tl.store(partial_lse + part, level, mask=known)


@triton.jit
def _attend_chunks(query, pool, contexts, query_start, tables, table_start, tile_row,
                   tile_start, part_keys, partial, partial_lse, out, block_stride, layer_at,
                   scale, HEADS: tl.constexpr, LATENT: tl.constexpr,
                   LATENT_WIDTH: tl.constexpr, ROTATED: tl.constexpr,
                   ROTATED_WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
                   KEYS: tl.constexpr, QUERIES: tl.constexpr, EXACT: tl.constexpr,
                   STAGES: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    # A tile is processed in groups of QUERIES, because more do not fit into registers beside
    # their sums.
    head = tl.program_id(0) // (TILE // QUERIES)
    in_tile = (tl.program_id(0) % (TILE // QUERIES)) * QUERIES + tl.arange(0, QUERIES)
    # The last tiles see the most keys, so they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = tl.load(tile_row + tile)
    start = tl.load(tile_start + tile)
    packed = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - packed
    context = tl.load(contexts + row)
    prefix = context - count
    table = tables + tl.load(table_start + row)
    of_tile = start + in_tile
    known = of_tile < count
    query_at = prefix + of_tile
    at = tl.arange(0, LATENT_WIDTH)
    rotated_at = tl.arange(0, ROTATED_WIDTH)
    token = (packed + of_tile).to(tl.int64)
    mine = query + (token * HEADS + head) * (LATENT + ROTATED)
    wanted = known[:, None] & (at < LATENT)[None, :]
    q = tl.load(mine[:, None] + at[None, :], mask=wanted, other=0.0)
    q_rotated = tl.load(
        mine[:, None] + LATENT + rotated_at[None, :],
        mask=known[:, None] & (rotated_at < ROTATED)[None, :],
        other=0.0,
    )
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, LATENT_WIDTH], tl.float32)
    end = tl.minimum(context, prefix + tl.max(of_tile, 0) + 1)
    begin = 0
    if PARTS > 1:
        size = tl.load(part_keys + tile)
        begin = tl.program_id(2) * size
        end = tl.minimum(end, begin + size)
    highest, total, summed = _keys_seen(
        q, q_rotated, highest, total, summed, begin, end, query_at, pool, table, block_stride,
        layer_at, scale, LATENT, LATENT_WIDTH, ROTATED, ROTATED_WIDTH, BLOCK_TOKENS, KEYS,
        True, EXACT, STAGES,
    )  # fmt: skip
    result = summed / tl.where(total == 0, 1.0, total)[:, None]
    if PARTS == 1:
        done = (token * HEADS + head) * LATENT
        tl.store(out + done[:, None] + at[None, :], result, mask=wanted)
    else:
        of_part = (tile * PARTS + tl.program_id(2)) * TILE + in_tile
        place = of_part.to(tl.int64) * HEADS + head
        tl.store(
            partial + place[:, None] * LATENT + at[None, :], result,
            mask=(at < LATENT)[None, :],
        )  # fmt: skip
        level = tl.where(total == 0, float("-inf"), highest + tl.log2(total))
        tl.store(partial_lse + place, level)


def attend_decodes(
    query: Tensor, pool: Tensor, layer: int, work: DecodeWork, variant: Variant, out: Tensor
) -> None:
    """Attention of one token per row; `query` is `[rows, heads * (latent + rotated)]`, `out`
    `[rows, heads, latent]`. Partial results of rows with several pieces are left in
    `work.partial`."""
    heads, latent = out.shape[1:]
    exact = query.element_size() == 4
    group = min(max(16, triton.next_power_of_2(heads)), 16 if exact else _MAX_DECODE_HEADS)
    early = starts_early(query, is_short=True)
    _attend_decodes[(triton.cdiv(heads, group), len(work.work_row))](
        query,
        pool,
        *work.lists,
        work.partial,
        work.partial_lse,
        out,
        pool.stride(0),
        layer * pool.stride(1),
        variant.scaling * 1.4426950408889634,
        **_shape(pool, heads, latent),
        KEYS=16 if exact else 32,
        QUERIES=group,
        EXACT=exact,
        STAGES=1 if exact else 3,
        EARLY=early,
        num_warps=4 if group <= 16 else 8,
        launch_pdl=early,
    )


def attend_chunks(
    query: Tensor, pool: Tensor, layer: int, work: ChunkWork, variant: Variant, out: Tensor
) -> None:
    """Attention of all tokens of the rows that have tiles; shapes as for `attend_decodes`.
    Partial results of tiles with several parts are left in `work.partial`."""
    heads, latent = out.shape[1:]
    exact = query.element_size() == 4
    queries = min(work.tile, _MAX_CHUNK_QUERIES)
    groups = work.tile // queries
    _attend_chunks[(heads * groups, len(work.tile_row), work.num_parts)](
        query,
        pool,
        *work.lists,
        work.part_keys,
        work.partial,
        work.partial_lse,
        out,
        pool.stride(0),
        layer * pool.stride(1),
        variant.scaling * 1.4426950408889634,
        **_shape(pool, heads, latent),
        KEYS=16 if exact else 32,
        QUERIES=queries,
        EXACT=exact,
        STAGES=1 if exact else 2,
        PARTS=work.num_parts,
        TILE=work.tile,
        num_warps=8,
    )


def _shape(pool: Tensor, heads: int, latent: int) -> dict[str, int]:
    rotated = pool.shape[-1] - latent
    return {
        "HEADS": heads,
        "LATENT": latent,
        "LATENT_WIDTH": max(16, triton.next_power_of_2(latent)),
        "ROTATED": rotated,
        "ROTATED_WIDTH": max(16, triton.next_power_of_2(rotated)),
        "BLOCK_TOKENS": pool.shape[3],
    }
