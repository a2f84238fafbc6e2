"""Storing latents (MLA): normalised, with their rotated part, in the pool; and the rotated part of
queries.

    stored for a token    | latent, normalised ........ LATENT | rotated .. ROTATED |
"""

import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.fp8 import power_of_two, stored_exponent
from headwater.device.kernels.rotary import RotaryPairs


@triton.jit
def rotate_rows(
    source,
    target,
    cosines,
    sines,
    position,
    live,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Rotate `[rows, 2 * HALF]` from pointers `source` to pointers `target`, one per row."""
    at = tl.arange(0, WIDTH)
    inside = live[:, None] & (at < HALF)[None, :]
    first, second = _rotated(source, cosines, sines, position, inside, HALF, WIDTH, PAIRS)
    place, beside = _rotated_places(target[:, None], HALF, WIDTH, PAIRS)
    tl.store(place, first, mask=inside)
    tl.store(place + beside, second, mask=inside)


@triton.jit
def _rotated(source, cosines, sines, position, inside, HALF: tl.constexpr, WIDTH: tl.constexpr,
             PAIRS: tl.constexpr):  # fmt: skip
    """Both elements of each pair, rotated."""
    at = tl.arange(0, WIDTH)
    # From one pair to the next, and from the first element of a pair to the second.
    step: tl.constexpr = 1 if PAIRS == 0 else 2
    beside: tl.constexpr = HALF if PAIRS == 0 else 1
    left = tl.load(source[:, None] + at[None, :] * step, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source[:, None] + at[None, :] * step + beside, mask=inside, other=0.0).to(
        tl.float32
    )
    angle = position.to(tl.int64) * HALF + at
    cosine = tl.load(cosines + angle, mask=at < HALF, other=0.0)[None, :]
    sine = tl.load(sines + angle, mask=at < HALF, other=0.0)[None, :]
    return left * cosine - right * sine, right * cosine + left * sine


@triton.jit
def _rotated_places(target, HALF: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Where the first elements of pairs go, and how far behind them the second ones."""
    step: tl.constexpr = 2 if PAIRS == 1 else 1
    beside: tl.constexpr = 1 if PAIRS == 1 else HALF
    return target + tl.arange(0, WIDTH)[None, :] * step, beside


@triton.jit
def _store(packed, packed_stride, positions, slots, norm_weight, epsilon, cosines, sines,
           pool, block_stride, layer_at, LATENT: tl.constexpr, LATENT_WIDTH: tl.constexpr,
           ROTATED: tl.constexpr, ROTATED_WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
           PAIRS: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(positions + token)
    row = packed + token * packed_stride
    at = tl.arange(0, LATENT_WIDTH)
    values = tl.load(row + at, mask=at < LATENT, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / LATENT + epsilon)
    weights = tl.load(norm_weight + at, mask=at < LATENT, other=0.0).to(tl.float32)
    values = values * scale * weights
    # The rotation takes a pointer per row; this token is the only row.
    one = tl.zeros([1], tl.int64)
    inside = (tl.arange(0, ROTATED_WIDTH) < ROTATED // 2)[None, :]
    first, second = _rotated(
        row + LATENT + one, cosines, sines, position, inside, ROTATED // 2, ROTATED_WIDTH, PAIRS
    )
    of_layer = slot * block_stride + layer_at
    in_block = position % BLOCK_TOKENS
    if FP8:
        # Rounded as in a 16-bit pool, so that a CPU stores the same.
        kind: tl.constexpr = packed.dtype.element_ty
        values = values.to(kind).to(tl.float32)
        first = first.to(kind).to(tl.float32)
        second = second.to(kind).to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second)))
        exponent = stored_exponent(tl.maximum(top, tl.max(tl.abs(values))), kind)
        inverse = power_of_two(254 - exponent)
        values, first, second = values * inverse, first * inverse, second * inverse
        scales = (
            pool.to(tl.pointer_type(tl.uint8)) + of_layer + BLOCK_TOKENS * (LATENT + ROTATED)
        )
        tl.store(scales + in_block, exponent.to(tl.uint8))
    place = pool + of_layer + in_block * (LATENT + ROTATED)
    tl.store(place + at, values.to(pool.dtype.element_ty), mask=at < LATENT)
    place, beside = _rotated_places(place + LATENT, ROTATED // 2, ROTATED_WIDTH, PAIRS)
    tl.store(place, first.to(pool.dtype.element_ty), mask=inside)
    tl.store(place + beside, second.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_queries(packed, packed_stride, positions, cosines, sines, query,
                    HEADS: tl.constexpr, PLAIN: tl.constexpr, LATENT: tl.constexpr,
                    ROTATED: tl.constexpr, ROTATED_WIDTH: tl.constexpr, PAIRS: tl.constexpr,
                    GROUP: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    position = tl.load(positions + token)
    source = packed + token * packed_stride + head * (PLAIN + ROTATED) + PLAIN
    target = query + (token * HEADS + head) * (LATENT + ROTATED) + LATENT
    rotate_rows(
        source, target, cosines, sines, position, head < HEADS,
        ROTATED // 2, ROTATED_WIDTH, PAIRS,
    )  # fmt: skip


def store_latents(
    packed: Tensor,
    positions: Tensor,
    slots: Tensor,
    norm: tuple[Tensor, float],
    table: tuple[Tensor, Tensor],
    pool: Tensor,
    layer: int,
    pairs: RotaryPairs,
) -> None:
    """Normalise, rotate and store latents, `[tokens, latent + rotated]`, whose rows may be
    strided. A token with slot -1 is not stored."""
    rotated = 2 * table[0].shape[1]
    latent = pool.shape[-1] - rotated
    early = starts_early(packed)
    _store[(len(packed),)](
        packed,
        packed.stride(0),
        positions,
        slots,
        *norm,
        *table,
        pool,
        pool.stride(0),
        layer * pool.stride(1),
        LATENT=latent,
        LATENT_WIDTH=triton.next_power_of_2(latent),
        ROTATED=rotated,
        ROTATED_WIDTH=triton.next_power_of_2(rotated // 2),
        BLOCK_TOKENS=pool.shape[3],
        PAIRS=int(pairs),
        FP8=pool.element_size() == 1,
        EARLY=early,
        num_warps=1,
        launch_pdl=early,
    )


def rotate_queries(
    packed: Tensor,
    positions: Tensor,
    table: tuple[Tensor, Tensor],
    query: Tensor,
    pairs: RotaryPairs,
) -> None:
    """Write the rotated part of queries, `[tokens, heads * (plain + rotated)]` in rows that may
    be strided, to the end of each head of `query`, `[tokens, heads, latent + rotated]`."""
    tokens, heads, size = query.shape
    rotated = 2 * table[0].shape[1]
    group = min(16, triton.next_power_of_2(heads))
    early = starts_early(packed)
    _rotate_queries[(tokens, triton.cdiv(heads, group))](
        packed,
        packed.stride(0),
        positions,
        *table,
        query,
        HEADS=heads,
        PLAIN=packed.shape[1] // heads - rotated,
        LATENT=size - rotated,
        ROTATED=rotated,
        ROTATED_WIDTH=triton.next_power_of_2(rotated // 2),
        PAIRS=int(pairs),
        GROUP=group,
        EARLY=early,
        num_warps=1,
        launch_pdl=early,
    )
