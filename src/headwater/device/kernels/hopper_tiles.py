"""Steps of prefill attention over one tile of keys, for the Hopper kernels, in Gluon."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headwater.device.kernels.ring import await_filled, await_room, leave
from headwater.device.kernels.tiles import LARGE_TILE

GROUP_QUERIES = gl.constexpr(LARGE_TILE // 2)
"""Queries of a group of warps."""

TILE_KEYS = gl.constexpr(128)
"""Keys of a tile."""

PAGE_KEYS = gl.constexpr(64)
"""Keys that must be contiguous in the pool."""

STAGES = gl.constexpr(2)
"""Tiles in flight."""

REGISTERS = gl.constexpr(240)
"""Registers of a thread that computes."""

ALL_REGISTERS = 168
"""Registers per thread, on average over all threads."""

TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def load_tile(pool, line, line_2, column, ring, done):
    """Load a tile of keys or values, two pages, as soon as its buffer is free."""
    buffer, bar = await_room(ring, done, 2 * pool.block_type.nbytes)
    tma.async_copy_global_to_shared(
        pool, [line, column], bar, buffer.slice(0, PAGE_KEYS, dim=0)
    )
    tma.async_copy_global_to_shared(
        pool, [line_2, column], bar, buffer.slice(PAGE_KEYS, PAGE_KEYS, dim=0)
    )


@gluon.jit
def softmax_tile(scores, highest, total, key, at, scale, MASKED: gl.constexpr):
    """Online softmax: weights of one tile, and the factor `decay` for the sums so far."""
    if MASKED:
        scores = gl.where(key[None, :] <= at[:, None], scores, float("-inf"))
    higher = gl.maximum(highest, gl.max(scores, 1))
    decay = gl.exp2((highest - higher) * scale)
    weights = gl.exp2(scores * scale - (higher * scale)[:, None])
    total = total * decay + gl.sum(weights, 1)
    return weights, decay, higher, total


@gluon.jit
def _rescale(summed, decay):
    """Multiply only if that makes a difference, which is rare after the first tiles."""
    decay = gl.convert_layout(decay, gl.SliceLayout(1, summed.type.layout), assert_trivial=True)
    return gl.inline_asm_elementwise(
        """{
            .reg .pred less;
            setp.neu.f32 less, $2, 0f3F800000;
            mov.f32 $0, $1;
            @less mul.f32 $0, $1, $2;
        }""",
        "=f,f,f",
        [summed, decay[:, None]],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def next_tile(query, k, v, done, key, at, scale, weights, highest, total, summed, unused,
               MASKED: gl.constexpr):  # fmt: skip
    """Scores of tile `done`, computed at the same time as the sums of the tile before it."""
    keys = await_filled(k, done)
    values = await_filled(v, done - 1)
    scores = warpgroup_mma(query, keys.permute((1, 0)), unused, use_acc=False, is_async=True)
    summed = warpgroup_mma(weights, values, summed, is_async=True)
    new = warpgroup_mma_wait(1, deps=(scores,))
    leave(k, done)
    decay = highest  # a value of the right type; it is replaced below
    if (
        done > -1
    ):  # always true, but keeps the compiler from moving the softmax behind the wait for sums
        new, decay, highest, total = softmax_tile(new, highest, total, key, at, scale, MASKED)
    summed, weights = warpgroup_mma_wait(0, deps=(summed, weights))
    leave(v, done - 1)
    weights = gl.convert_layout(new.to(query.dtype), weights.type.layout, assert_trivial=True)
    return weights, highest, total, _rescale(summed, decay)


@gluon.jit
def zero_tail(v, key, context, DIM: gl.constexpr):
    """Write zeros where a tile has no keys: zero times undefined memory could be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    keys = key + gl.arange(0, TILE_KEYS // 2, layout=gl.SliceLayout(1, layout))
    values = v.load(layout)
    v.store(gl.where((keys < context)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
