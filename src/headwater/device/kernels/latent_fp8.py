"""Decode attention over latent KV in 8 bits, in the pieces that `decode` describes.

As in `decode_fp8`, neighbouring elements are read as one 16-bit number, because only 16-bit
numbers can be transposed while they are read from shared memory. The first elements of the pairs
are a matrix, and the second ones are another; each has products of its own with the elements of
queries that belong to it. Both are float16, which represents every e4m3 value exactly.

    stored latents      0 1 2 3 4 5 …       even   0 2 4 …      odd   1 3 5 …

Keys and values of a token are the same numbers and share a scale. It multiplies the scores, and
as `decode_fp8` explains, it is added to the logarithms of weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.kernels.decode_fp8 import MIN_EXPONENT
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.fp8 import power_of_two, scale_exponent
from headwater.device.kernels.pieces import DecodeWork
from headwater.device.kernels.unpack import e4m3_halves

_KEYS, _QUERIES, _STAGES = 32, 16, 3
"""Three programs fit on a processor of an H200. With 16 queries, products need one warp each."""

_MIN_SIZE = 32
"""Minimum latent and rotated size: products need 16 pairs."""


@triton.jit
def _halves(mine, known, WIDTH: tl.constexpr):
    """Even and odd elements of queries, float32."""
    at = mine[:, None] + 2 * tl.arange(0, WIDTH)[None, :]
    even = tl.load(at, mask=known[:, None], other=0.0).to(tl.float32)
    return even, tl.load(at + 1, mask=known[:, None], other=0.0).to(tl.float32)


@triton.jit
def _largest(even, odd):
    return tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))


@triton.jit
def _exponents(scales, slot, key, BLOCK_TOKENS: tl.constexpr, block_stride):
    """Exponent bytes of keys of one block."""
    return tl.load(scales + slot.to(tl.int64) * block_stride + key % BLOCK_TOKENS)


@triton.jit
def _attend(
    query,
    pairs,
    scales,
    contexts,
    tables,
    table_start,
    piece,
    work_row,
    work_start,
    row_work,
    partial,
    partial_lse,
    out,
    pair_stride,
    block_stride,
    layer_at,
    scaling,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
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
    size: tl.constexpr = LATENT + ROTATED
    width: tl.constexpr = LATENT // 2
    rotated_width: tl.constexpr = ROTATED // 2
    head = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    known = head < HEADS
    at = tl.arange(0, width)
    rotated_at = tl.arange(0, rotated_width)
    mine = query + (row.to(tl.int64) * HEADS + head) * size
    q_even, q_odd = _halves(mine, known, width)
    r_even, r_odd = _halves(mine + LATENT, known, rotated_width)
    top = tl.maximum(_largest(q_even, q_odd), _largest(r_even, r_odd))
    q_exponent = scale_exponent(top)
    # 254 - e is the exponent byte of the inverse: 2 ** (127 - e).
    inverse = power_of_two(254 - q_exponent)[:, None]
    q_even, q_odd = (q_even * inverse).to(tl.float16), (q_odd * inverse).to(tl.float16)
    r_even, r_odd = (r_even * inverse).to(tl.float16), (r_odd * inverse).to(tl.float16)
    q_scale = power_of_two(q_exponent) * (scaling * 1.4426950408889634)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    even = tl.zeros([QUERIES, width], tl.float32)
    odd = tl.zeros([QUERIES, width], tl.float32)
    in_tile = tl.arange(0, KEYS)
    # Slots and scales are read one iteration ahead: such small loads are not pipelined, and
    # neither is a load that depends on a slot read in the same iteration.
    slot = tl.load(table + start // BLOCK_TOKENS, mask=start < end, other=0)
    following = _exponents(scales + layer_at, slot, start + in_tile, BLOCK_TOKENS, block_stride)
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        key = first + in_tile
        seen = key < end
        place = slot.to(tl.int64) * pair_stride + layer_at // 2
        place = place + (key % BLOCK_TOKENS) * (size // 2)
        exponent = following.to(tl.int32)
        slot = tl.load(table + tl.minimum(first + KEYS, end - 1) // BLOCK_TOKENS)
        following = _exponents(scales + layer_at, slot, key + KEYS, BLOCK_TOKENS, block_stride)
        latent = tl.load(pairs + place[:, None] + at[None, :], mask=seen[:, None], other=0)
        rotated = tl.load(
            pairs + place[:, None] + width + rotated_at[None, :], mask=seen[:, None], other=0
        )
        # Two sums of products: in a single one each product would wait for the one before.
        k_even, k_odd = e4m3_halves(tl.trans(latent))
        scores, others = tl.dot(q_even, k_even), tl.dot(q_odd, k_odd)
        k_even, k_odd = e4m3_halves(tl.trans(rotated))
        scores = tl.dot(r_even, k_even, scores) + tl.dot(r_odd, k_odd, others)
        shift = (tl.maximum(exponent, LEAST) - 127).to(tl.float32)
        scores = scores * (q_scale[:, None] * power_of_two(exponent)[None, :])
        scores = tl.where(seen[None, :], scores + shift[None, :], float("-inf"))
        # The first key of a tile is always seen, so the maximum is finite.
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(highest - higher)
        # The weights contain the scales of the values; the sum of weights must not contain them.
        total = total * decay + tl.sum(weights * tl.exp2(-shift)[None, :], 1)
        weights = weights.to(tl.float16)
        v_even, v_odd = e4m3_halves(latent)
        even = tl.dot(weights, v_even, even * decay[:, None])
        odd = tl.dot(weights, v_odd, odd * decay[:, None])
        highest = higher
    of_sum = (1.0 / tl.where(total == 0, 1.0, total))[:, None]
    even *= of_sum
    odd *= of_sum
    wanted = known[:, None] & (at >= 0)[None, :]
    if is_whole:
        done = out + (row.to(tl.int64) * HEADS + head)[:, None] * LATENT + 2 * at[None, :]
        tl.store(done, even.to(out.dtype.element_ty), mask=wanted)
        tl.store(done + 1, odd.to(out.dtype.element_ty), mask=wanted)
    else:
        part = item.to(tl.int64) * HEADS + head
        left = partial + part[:, None] * LATENT + 2 * at[None, :]
        tl.store(left, even, mask=wanted)
        tl.store(left + 1, odd, mask=wanted)
        level = tl.where(total == 0, float("-inf"), highest + tl.log2(total))
        tl.store(partial_lse + part, level, mask=known)


def attend_pieces(
    query: Tensor, pool: Tensor, layer: int, work: DecodeWork, variant: Variant, out: Tensor
) -> None:
    """Attend the pieces of `decode.attend_decodes`, which joins them; usable if `fits` returns
    True. Shapes are those of `latent.attend_decodes`."""
    heads, latent = out.shape[1:]
    block_tokens, size = pool.shape[3], pool.shape[-1]
    whole = pool.as_strided((len(pool) * pool.stride(0),), (1,))
    early = starts_early(query, is_short=True)
    _attend[(triton.cdiv(heads, _QUERIES), len(work.work_row))](
        query,
        whole.view(torch.int16),
        # Scales of a layer follow its elements.
        whole.view(torch.uint8)[block_tokens * size :],
        *work.lists,
        work.partial,
        work.partial_lse,
        out,
        pool.stride(0) // 2,
        pool.stride(0),
        layer * pool.stride(1),
        variant.scaling,
        HEADS=heads,
        LATENT=latent,
        ROTATED=size - latent,
        BLOCK_TOKENS=block_tokens,
        KEYS=_KEYS,
        QUERIES=_QUERIES,
        LEAST=MIN_EXPONENT,
        STAGES=_STAGES,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )


def fits(query: Tensor, pool: Tensor, latent: int) -> bool:
    """Whether this kernel can attend to a pool: it has 8-bit latents of sizes for products, and
    the device converts e4m3 numbers."""
    rotated = pool.shape[-1] - latent
    return (
        query.element_size() == 2
        and pool.element_size() == 1
        and pool.shape[3] % _KEYS == 0
        and pool.stride(1) % 2 == 0
        and all(n >= _MIN_SIZE and n & (n - 1) == 0 for n in (latent, rotated))
        and _converts(pool.device)
    )


def _converts(device: torch.device) -> bool:
    """Whether the device has the instructions of `e4m3_halves`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
