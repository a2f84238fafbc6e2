"""Decode attention as in `decode`, for Hopper and later: TMA loads keys and values.

Keys and values go from shared memory directly into transposed products; scores are
`[keys, queries]`. This takes eight queries at a time instead of sixteen, and no thread moves
data, so it needs less power, which limits a busy device. Queries of several KV heads may be
computed together: `q` is zero where a query does not belong to the head, and so is its result.

     k of 2 heads        q of 8 queries          v of 2 heads, transposed  weights
    [64, 256]      @     [256, 8]               [256, 64]            @    [64, 8]
                          x x x x 0 0 0 0
                          0 0 0 0 x x x x
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.device.attention.base import Variant
from headwater.device.kernels.early import start_early, starts_early
from headwater.device.kernels.pieces import DecodeWork

_KEYS = 64
"""Keys of a tile."""

_QUERIES = 8
"""Queries of a product. For more, Triton takes `wgmma` with weights from shared memory; kernels
with such products gave wrong results on an H200 (Triton 3.6)."""

_MAX_WIDTH = 256
"""Largest total key size of the heads that are computed together."""

_FEW_ROWS = 64
"""Up to this many rows, heads are computed together."""

_FEW_STAGES, _STAGES = 2, 3
"""Tiles in flight, for up to `_FEW_ROWS` rows and for more. With three, fewer programs fit on a
processor: on an H200 that is slower for 32 rows of 1,024 tokens or for one long row, as fast for 128
rows of 1,024 tokens, and 9 % faster for 96 rows of 8,192 tokens."""

_MIN_WIDE_ROWS = 8
"""Minimum number of rows for heads of 256 elements. With fewer, the kernel in `decode` is
faster: its tiles need no descriptors and its pieces are joined by more programs."""


@triton.jit
def _attend_tile(k, v, q, key, end, since, highest, total, summed, scale, WINDOWED: tl.constexpr,
          PARTLY: tl.constexpr):  # fmt: skip
    """Attend to one tile of keys. `PARTLY`: the tile has keys after the end, whose values are
    zeros."""
    seen = key < end
    if WINDOWED:
        seen = seen & (key >= since)
    scores = tl.dot(k, q) * scale
    if WINDOWED or PARTLY:
        scores = tl.where(seen[:, None], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 0))
    base = higher
    if WINDOWED:
        # If nothing was seen yet, the maximum is -infinity, and -infinity minus itself is NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[None, :])
    decay = tl.exp2(highest - base)
    total = total * decay + tl.sum(weights, 0)
    summed = tl.dot(tl.trans(v), weights.to(v.dtype), summed * decay[None, :])
    return higher, total, summed


@triton.jit
def _join(partial, partial_lse, begin, end, head, known, at, wanted, HEADS: tl.constexpr,
          DIM: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr,
          UNROLLED: tl.constexpr):  # fmt: skip
    """Join the pieces `[begin, end)` of a row, which other programs may have just written."""
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    # From the second-level cache: other processors have written it during this kernel, and the
    # first-level cache may hold old bytes.
    for item in tl.range(begin, end, 8):
        of_items = item + tl.arange(0, 8)
        level = tl.load(
            partial_lse + of_items[:, None] * HEADS + head[None, :],
            mask=(of_items < end)[:, None] & known[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        top = tl.maximum(top, tl.max(level, 0))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([WIDE, QUERIES], tl.float32)
    # Several pieces at a time: their loads do not wait for each other.
    for first in range(begin, end, UNROLLED):
        for number in tl.static_range(UNROLLED):
            item = first + number
            place = item * HEADS + head
            level = tl.load(
                partial_lse + place, mask=known & (item < end), other=float("-inf"),
                cache_modifier=".cg",
            )  # fmt: skip
            values = tl.load(
                partial + place[None, :] * DIM + at[:, None], mask=wanted & (item < end),
                other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            weight = tl.exp2(level - top)
            summed += values * weight[None, :]
            total += weight
    return summed / tl.where(total == 0, 1.0, total)[None, :]


@triton.jit
def _attend(
    query,
    tiles,
    pool,
    contexts,
    tables,
    table_start,
    piece,
    work_row,
    work_start,
    row_work,
    arrived,
    partial,
    partial_lse,
    out,
    query_stride,
    block_rows,
    layer_row,
    scaling,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOWED: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    part = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(work_row + item)
    is_used = row >= 0
    row = tl.maximum(row, 0)
    group: tl.constexpr = HEADS // KV_HEADS
    wide: tl.constexpr = DIM * TOGETHER
    start = tl.load(work_start + item)
    context = tl.load(contexts + row)
    end = tl.minimum(start + tl.load(piece), context)
    since = context - window
    if WINDOWED:
        start = tl.maximum(start, (tl.maximum(since, 0) // KEYS) * KEYS)
    table = tables + tl.load(table_start + row)
    # Lists and tables are those of the step: no kernel of the step writes them.
    begin = tl.load(row_work + row)
    last = tl.load(row_work + row + 1)
    whole = start + tl.maximum(end - start, 0) // KEYS * KEYS
    rest_slot = tl.load(table + tl.maximum(tl.minimum(whole, context - 1), 0) // BLOCK_TOKENS)
    slot = tl.load(table + tl.maximum(tl.minimum(start, context - 1), 0) // BLOCK_TOKENS)
    start_early(EARLY)
    if not is_used:
        return
    of_group = tl.arange(0, QUERIES)
    number = tl.arange(0, wide)
    at = number % DIM
    head = part * (group * TOGETHER) + of_group
    known = of_group < group * TOGETHER
    # True where the elements of a KV head meet the queries of the same head; see the drawing
    # above.
    wanted = (number // DIM)[:, None] == (of_group // group)[None, :]
    rows = query + row.to(tl.int64) * query_stride + head[None, :] * DIM + at[:, None]
    q = tl.load(rows, mask=wanted, other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([wide, QUERIES], tl.float32)
    scale = scaling * 1.4426950408889634
    column = part * wide
    # Threads read a last tile that is not full, only up to its end. The read starts here and is
    # used at the end, so that nothing waits for it.
    rest_key = whole + tl.arange(0, KEYS)
    line = rest_slot * block_rows + layer_row + rest_key % BLOCK_TOKENS
    rest = pool + line[:, None].to(tl.int64) * (KV_HEADS * DIM) + (column + number)[None, :]
    in_rest = (rest_key < end)[:, None]
    rest_k = tl.load(rest, mask=in_rest, other=0.0)
    rest_v = tl.load(rest + BLOCK_TOKENS * KV_HEADS * DIM, mask=in_rest, other=0.0)
    # Slots are read one iteration ahead: a load that depends on a slot read in the same
    # iteration is not pipelined.
    for first in tl.range(start, whole, KEYS, num_stages=STAGES):
        place = slot * block_rows + layer_row + first % BLOCK_TOKENS
        slot = tl.load(table + tl.minimum(first + KEYS, end - 1) // BLOCK_TOKENS)
        k = tiles.load([place, column])
        v = tiles.load([place + BLOCK_TOKENS, column])
        key = first + tl.arange(0, KEYS)
        highest, total, summed = _attend_tile(
            k, v, q, key, end, since, highest, total, summed, scale, WINDOWED, False
        )
    if whole < end:
        highest, total, summed = _attend_tile(
            rest_k, rest_v, q, rest_key, end, since, highest, total, summed, scale, WINDOWED,
            True,
        )  # fmt: skip
    result = summed / tl.where(total == 0, 1.0, total)[None, :]
    done = row.to(tl.int64) * (HEADS * DIM) + head[None, :] * DIM + at[:, None]
    if last - begin == 1:
        tl.store(out + done, result, mask=wanted)
    else:
        mine = item * HEADS + head
        tl.store(partial + mine[None, :] * DIM + at[:, None], result, mask=wanted)
        level = tl.where(total == 0, float("-inf"), highest + tl.log2(total))
        tl.store(partial_lse + mine, level, mask=known)
        tl.debug_barrier()  # all threads must have written before one of them counts
        counter = arrived + row * KV_HEADS + part
        # The last program of a row joins it, and leaves the counter at zero for the next layer.
        if tl.atomic_add(counter, 1, sem="acq_rel") == last - begin - 1:
            tl.store(counter, 0)
            joined = _join(
                partial, partial_lse, begin, last, head, known, at, wanted, HEADS, DIM, wide,
                QUERIES, 8,
            )  # fmt: skip
            tl.store(out + done, joined, mask=wanted)


def attend_decodes(
    query: Tensor, pool: Tensor, layer: int, work: DecodeWork, variant: Variant, out: Tensor
) -> None:
    """Like `decode.attend_decodes`; usable if `fits` returns True."""
    num_layers, _, block_tokens, kv_heads, dim = pool.shape[1:]
    heads = out.shape[1]
    group = heads // kv_heads
    has_few_rows = len(out) <= _FEW_ROWS
    together = _together(group, kv_heads, dim) if has_few_rows else 1
    tiles = TensorDescriptor.from_tensor(pool.view(-1, kv_heads * dim), [_KEYS, dim * together])
    early = starts_early(query, is_short=True)
    _attend[(kv_heads // together, len(work.work_row))](
        query,
        tiles,
        pool,
        *work.lists,
        work.arrived,
        work.partial,
        work.partial_lse,
        out,
        query.stride(0),
        num_layers * 2 * block_tokens,
        layer * 2 * block_tokens,
        variant.scaling,
        variant.window or 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        TOGETHER=together,
        BLOCK_TOKENS=block_tokens,
        KEYS=_KEYS,
        QUERIES=_QUERIES,
        WINDOWED=variant.window is not None,
        STAGES=_FEW_STAGES if has_few_rows else _STAGES,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )


def fits(pool: Tensor, variant: Variant, out: Tensor) -> bool:
    """Whether TMA can load the tiles of a pool, attention is plain or windowed, few heads share
    a KV head, and this kernel is faster for this many rows."""
    block_tokens, kv_heads, dim = pool.shape[3:]
    num_rows, heads = out.shape[:2]
    return (
        variant.softcap is None
        and variant.sinks is None
        and pool.element_size() == 2
        and heads <= _QUERIES * kv_heads
        and block_tokens % _KEYS == 0
        and (dim in (64, 128) or (dim == 256 and num_rows >= _MIN_WIDE_ROWS))
        and torch.cuda.get_device_capability(pool.device) >= (9, 0)
    )


def _together(group: int, kv_heads: int, dim: int) -> int:
    """KV heads whose queries together fill a product."""
    together = 1
    while (
        together * 2 * group <= _QUERIES
        and kv_heads % (together * 2) == 0
        and together * 2 * dim <= _MAX_WIDTH
    ):
        together *= 2
    return together
