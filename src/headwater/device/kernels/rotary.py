"""Applies rotary embedding to Q and K in place and stores K and V in the block pool, in one
pass.

a row of `packed`   | Q heads ........ | K heads | V heads |
pool                slot: layer: K of token 0, 1, … | V of token 0, 1, … | their scales, in an fp8 pool
"""

from enum import IntEnum
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.fp8 import power_of_two, stored_exponent

_FEW_ROWS, _FEW_HEADS, _MANY_HEADS = 64, 4, 16
"""Up to this many rows, a program has few heads, so that there are enough programs."""


class RotaryPairs(IntEnum):
    """Which elements of a head are rotated together, and where the results go."""

    HALVES = 0
    """Element i of the first half with element i of the second; in place."""

    NEIGHBOURS = 1
    """Two neighbouring elements; in place."""

    NEIGHBOURS_TO_HALVES = 2
    """Two neighbouring elements; the first of each pair goes to the first half, the second to
    the second half. Only for latent KV."""


class HeadNorms(NamedTuple):
    """Norms of single heads, as in Qwen3."""

    query: Tensor
    key: Tensor
    epsilon: float
    is_last: bool = False
    """Whether heads are normalised after their rotation, as in Hunyuan."""


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
    STEP: tl.constexpr,
    APART: tl.constexpr,
    WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORMED: tl.constexpr,
    NORM_LAST: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rotate `HALF` pairs of elements of a head; the following ones are unchanged. Pairs begin
    `STEP` elements after each other, and their elements are `APART` elements apart."""
    start_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    at = tl.arange(0, WIDTH)
    rest_at = 2 * HALF + tl.arange(0, REST_WIDTH)
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    has_rest: tl.constexpr = 2 * HALF < DIM
    inside = (head < all_heads)[:, None] & (at < HALF)[None, :]
    row = packed + token * all_heads * DIM + head[:, None] * DIM
    left_at = STEP * at
    right_at = left_at + APART
    left = tl.load(row + left_at[None, :], mask=inside, other=0.0).to(tl.float32)
    right = tl.load(row + right_at[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated = (head < HEADS + KV_HEADS)[:, None]
    is_query = (head < HEADS)[:, None]
    in_rest = (head < all_heads)[:, None] & (rest_at < DIM)[None, :]
    if has_rest:
        rest = tl.load(row + rest_at[None, :], mask=in_rest, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        if has_rest:
            squares += tl.sum(rest * rest, 1)
        # A rotation does not change this scale, so only the weights depend on the order.
        scale = tl.rsqrt(squares / DIM + epsilon)[:, None]
        known = at < HALF
        left_scale = _scales(scale, query_norm, key_norm, left_at, known, is_query, rotated)
        right_scale = _scales(scale, query_norm, key_norm, right_at, known, is_query, rotated)
        if not NORM_LAST:
            left = left * left_scale
            right = right * right_scale
        if has_rest:
            rest = rest * _scales(
                scale, query_norm, key_norm, rest_at, rest_at < DIM, is_query, rotated
            )
            tl.store(row + rest_at[None, :], rest, mask=in_rest & rotated)
    position = tl.load(positions + token)
    angle = position.to(tl.int64) * HALF + at
    cosine = tl.load(cosines + angle, mask=at < HALF, other=0.0)[None, :]
    sine = tl.load(sines + angle, mask=at < HALF, other=0.0)[None, :]
    rotated_left = tl.where(rotated, left * cosine - right * sine, left)
    rotated_right = tl.where(rotated, right * cosine + left * sine, right)
    if NORMED and NORM_LAST:
        rotated_left = rotated_left * left_scale
        rotated_right = rotated_right * right_scale
    tl.store(row + left_at[None, :], rotated_left, mask=inside & rotated)
    tl.store(row + right_at[None, :], rotated_right, mask=inside & rotated)
    slot = tl.load(slots + token).to(tl.int64)
    plane = tl.where(head < HEADS + KV_HEADS, 0, 1)
    kv_head = tl.where(plane == 0, head - HEADS, head - HEADS - KV_HEADS)
    in_block = plane * BLOCK_TOKENS + position % BLOCK_TOKENS
    # For queries `kv_head` is negative; `is_stored` keeps them out of the pool.
    target = slot * block_stride + layer_at + (in_block * KV_HEADS + kv_head) * DIM
    is_stored = (head >= HEADS)[:, None] & (slot >= 0)
    place = pool + target[:, None]
    if FP8:
        # Rounded as in a 16-bit pool, so that rounding does not depend on the kernel.
        kind: tl.constexpr = packed.dtype.element_ty
        rotated_left = rotated_left.to(kind).to(tl.float32)
        rotated_right = rotated_right.to(kind).to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(rotated_left), 1), tl.max(tl.abs(rotated_right), 1))
        if has_rest:
            rest = rest.to(kind).to(tl.float32)
            top = tl.maximum(top, tl.max(tl.abs(rest), 1))
        exponent = stored_exponent(top, kind)
        # 254 - e is the exponent byte of the inverse: 2 ** (127 - e).
        inverse = power_of_two(254 - exponent)[:, None]
        rotated_left = rotated_left * inverse
        rotated_right = rotated_right * inverse
        if has_rest:
            rest = rest * inverse
        scales = pool.to(tl.pointer_type(tl.uint8)) + slot * block_stride + layer_at
        scales += 2 * BLOCK_TOKENS * KV_HEADS * DIM + in_block * KV_HEADS + kv_head
        stored = (head >= HEADS) & (head < all_heads) & (slot >= 0)
        tl.store(scales, exponent.to(tl.uint8), mask=stored)
    tl.store(
        place + left_at[None, :],
        rotated_left.to(pool.dtype.element_ty),
        mask=inside & is_stored,
    )
    tl.store(
        place + right_at[None, :],
        rotated_right.to(pool.dtype.element_ty),
        mask=inside & is_stored,
    )
    if has_rest:
        tl.store(
            place + rest_at[None, :], rest.to(pool.dtype.element_ty), mask=in_rest & is_stored
        )


@triton.jit
def _scales(scale, query_norm, key_norm, at, known, is_query, is_normed):
    """The factors of the elements `at` of each head: for Q and K the scale of the head times
    the weights of their norm, for V one."""
    of_query = tl.load(query_norm + at, mask=known, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(key_norm + at, mask=known, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_normed, scale * tl.where(is_query, of_query, of_key), 1.0)


def rotate(
    packed: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: tuple[Tensor, Tensor],
    pool: Tensor,
    layer: int,
    norms: HeadNorms | None,
    pairs: RotaryPairs = RotaryPairs.HALVES,
) -> None:
    """Rotate Q and K of `packed`, `[tokens, (heads + 2 kv_heads) * dim]`; store K and V.

    A token with slot -1 is not stored. `table` has the cosines and sines by position, half as
    many as there are rotated elements.
    """
    block_tokens, kv_heads, dim = pool.shape[3:]
    heads = packed.shape[1] // dim - 2 * kv_heads
    most = _FEW_HEADS if len(packed) <= _FEW_ROWS else _MANY_HEADS
    group = min(most, triton.next_power_of_2(heads + 2 * kv_heads))
    half = table[0].shape[1]
    query_norm, key_norm, epsilon, is_last = norms or (packed, packed, 0.0, False)
    step, apart = (1, half) if pairs is RotaryPairs.HALVES else (2, 1)
    grid = (len(packed), triton.cdiv(heads + 2 * kv_heads, group))
    early = starts_early(packed, is_short=True)
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
        HALF=half,
        STEP=step,
        APART=apart,
        WIDTH=triton.next_power_of_2(half),
        REST_WIDTH=triton.next_power_of_2(max(dim - 2 * half, 1)),
        BLOCK_TOKENS=block_tokens,
        NORMED=norms is not None,
        NORM_LAST=is_last,
        GROUP=group,
        FP8=pool.element_size() == 1,
        EARLY=early,
        launch_pdl=early,
    )
