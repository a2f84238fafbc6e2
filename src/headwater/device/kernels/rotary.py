"""Rotary embedding of Q and K in place, and K and V into the block pool, in one pass.

a row of `packed`   | Q heads ........ | K heads | V heads |
pool                slot: layer: K of token 0, 1, … | V of token 0, 1, …
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class HeadNorms(NamedTuple):
    """Norms of single heads before rotation, as Qwen3 has them."""

    query: Tensor
    key: Tensor
    epsilon: float


@triton.jit
def _rotate(
    packed,
    positions,
    slots,
    cosines,
    sines,
    pool,
    query_norm,
    key_norm,
    epsilon,
    block_stride,
    layer_at,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORMED: tl.constexpr,
    GROUP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    at = tl.arange(0, HALF)
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    inside = (head < all_heads)[:, None] & (at < DIM // 2)[None, :]
    row = packed + token * all_heads * DIM + head[:, None] * DIM + at[None, :]
    left = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(row + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    rotated = (head < HEADS + KV_HEADS)[:, None]
    if NORMED:
        is_query = (head < HEADS)[:, None]
        squares = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM
        scale = tl.rsqrt(squares + epsilon)[:, None]
        half_in = at < DIM // 2
        query_left = tl.load(query_norm + at, mask=half_in).to(tl.float32)[None, :]
        query_right = tl.load(query_norm + DIM // 2 + at, mask=half_in).to(tl.float32)[None, :]
        key_left = tl.load(key_norm + at, mask=half_in).to(tl.float32)[None, :]
        key_right = tl.load(key_norm + DIM // 2 + at, mask=half_in).to(tl.float32)[None, :]
        normed_left = left * scale * tl.where(is_query, query_left, key_left)
        normed_right = right * scale * tl.where(is_query, query_right, key_right)
        left = tl.where(rotated, normed_left, left)
        right = tl.where(rotated, normed_right, right)
    position = tl.load(positions + token)
    angle = position.to(tl.int64) * (DIM // 2) + at
    cosine = tl.load(cosines + angle, mask=at < DIM // 2, other=0.0)[None, :]
    sine = tl.load(sines + angle, mask=at < DIM // 2, other=0.0)[None, :]
    rotated_left = tl.where(rotated, left * cosine - right * sine, left)
    rotated_right = tl.where(rotated, right * cosine + left * sine, right)
    tl.store(row, rotated_left, mask=inside & rotated)
    tl.store(row + DIM // 2, rotated_right, mask=inside & rotated)
    slot = tl.load(slots + token).to(tl.int64)
    plane = tl.where(head < HEADS + KV_HEADS, 0, 1)
    kv_head = tl.where(plane == 0, head - HEADS, head - HEADS - KV_HEADS)
    in_block = plane * BLOCK_TOKENS + position % BLOCK_TOKENS
    target = slot * block_stride + layer_at + (in_block * KV_HEADS + kv_head) * DIM
    stored = inside & (head >= HEADS)[:, None] & (slot >= 0)
    place = pool + target[:, None] + at[None, :]
    tl.store(place, rotated_left, mask=stored)
    tl.store(place + DIM // 2, rotated_right, mask=stored)


def rotate(
    packed: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: tuple[Tensor, Tensor],
    pool: Tensor,
    layer: int,
    norms: HeadNorms | None,
) -> None:
    """Turn Q and K of `packed`, `[tokens, (heads + 2 kv_heads) * dim]`; store K and V.

    A token whose slot is -1 is stored nowhere. `table` is cosines and sines by position.
    """
    block_tokens, kv_heads, dim = pool.shape[3:]
    heads = packed.shape[1] // dim - 2 * kv_heads
    group = min(16, triton.next_power_of_2(heads + 2 * kv_heads))
    query_norm, key_norm, epsilon = norms or (packed, packed, 0.0)
    grid = (len(packed), triton.cdiv(heads + 2 * kv_heads, group))
    _rotate[grid](
        packed,
        positions,
        slots,
        *table,
        pool,
        query_norm,
        key_norm,
        epsilon,
        pool.stride(0),
        layer * pool.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=triton.next_power_of_2(dim // 2),
        BLOCK_TOKENS=block_tokens,
        NORMED=norms is not None,
        GROUP=group,
    )
