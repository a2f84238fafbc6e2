"""The least value of a row that top-k and top-p keep, without sorting.

    search       8 pivots per pass between `low` and `high`: sums of what is above each pivot
    first pass   the pivots are near the largest value, where models put the threshold

The search keeps two facts: every element at or above `high` is kept, every element at or below
`low` is dropped. When few elements are left between them, these are collected and compared with
each other. It also ends when no float lies between them, so equal elements are kept or dropped together.
"""

import triton
import triton.language as tl

FEW = 256
"""Elements that are collected and compared with each other at the end of a search."""

_REACH = tl.constexpr(40.0)
"""A search for the k largest elements begins this far below the largest."""


@triton.jit
def read_values(row, at, VOCAB: tl.constexpr):
    """Values of a row; negative infinity after the end. Loops read one block ahead, so that the
    next values are being loaded while these are used."""
    return tl.load(row + at, mask=at < VOCAB, other=float("-inf"))


@triton.jit
def _below(value):
    # Two float32 steps below, so that the element itself is above the result.
    return value - tl.abs(value) * 2.4e-7 - 1e-37


@triton.jit
def _above(value):
    return value + tl.abs(value) * 2.4e-7 + 1e-37


@triton.jit
def _narrow(pivot, above, target, low, high, sum_low, sum_high):
    """The bounds after one pivot: it becomes `low` if the sum `above` it reaches the target,
    otherwise `high`."""
    if above >= target:
        if pivot >= low:
            low = pivot
            sum_low = above
    elif pivot <= high:
        high = pivot
        sum_high = above
    return low, high, sum_low, sum_high


@triton.jit
def _weigh(values, top, heat, by_count):
    """What an element adds to a sum: one, or its weight."""
    return tl.where(by_count, 1.0, tl.exp2((values - top) * heat))


@triton.jit
def _settle(room, count, high, above, top, heat, target, by_count, FEW: tl.constexpr):
    """The least kept value among collected elements; `above` is the sum over all larger ones.

    Sums are in double precision: elements were collected in any order, and the result must not
    depend on it.
    """
    number = tl.arange(0, FEW)
    # Written by other threads of this program, so it must not be read from the first-level
    # cache.
    values = tl.load(
        room + number, mask=number < count, other=float("-inf"), cache_modifier=".cg"
    )
    before = tl.zeros([FEW], tl.float64) + above
    for first in range(0, count, 32):
        at = first + tl.arange(0, 32)
        others = tl.load(room + at, mask=at < count, other=float("-inf"), cache_modifier=".cg")
        weights = tl.where(at < count, _weigh(others, top, heat, by_count), 0.0)
        is_above = others[None, :] > values[:, None]
        before += tl.sum(tl.where(is_above, weights[None, :], 0.0).to(tl.float64), 1)
    kept = (before < target) & (number < count)
    return tl.minimum(high, tl.min(tl.where(kept, values, float("inf")), 0))


@triton.jit
def _collect(row, room, counter, low, high, top, heat, by_count, VOCAB: tl.constexpr,
             BLOCK: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """Put at most `FEW` elements above `low` and not above `high` into `room`, in any order.
    Returns how many there are, and the sum over all larger ones."""
    over = tl.zeros([BLOCK], tl.float32)
    tl.store(counter, 0)
    tl.debug_barrier()
    ahead = read_values(row, tl.arange(0, BLOCK), VOCAB)
    for first in range(0, VOCAB, BLOCK):
        values = ahead.to(tl.float32)
        ahead = read_values(row, first + BLOCK + tl.arange(0, BLOCK), VOCAB)
        over += tl.where(values > high, _weigh(values, top, heat, by_count), 0.0)
        found = (values > low) & (values <= high)
        place = tl.atomic_add(
            counter + tl.zeros([BLOCK], tl.int32), 1, mask=found, sem="relaxed"
        )
        tl.store(room + place, values, mask=found & (place < FEW))
    tl.debug_barrier()
    return tl.load(counter, cache_modifier=".cg"), tl.sum(over, 0)


@triton.jit
def _search(row, room, counter, low, high, top, heat, by_count, target, share, at_most, is_near,
            VOCAB: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """The threshold `high`, as small as possible: elements at or above it are kept, and the sum
    over all elements above a kept one is less than the target. The sum counts elements, or adds
    their weights. A negative `target` stands for `share` of the sum over everything above
    `low`. About `at_most` elements are above `low`; if these are few, `target` is not negative.
    `is_near` means that `low` is a guess, far below `high`: if less than a counted target lies
    above it, the search begins again below the smallest element.
    """
    sum_low = low * 0.0
    sum_high = low * 0.0
    is_first = low < float("inf")  # always true, but a value that the loop can change
    going = low < high
    while going:
        if at_most <= FEW:
            count, above = _collect(row, room, counter, low, high, top, heat, by_count, VOCAB,
                                    BLOCK, FEW)  # fmt: skip
            # More than `FEW` are left only if many elements equal the k-th largest.
            going = count > FEW
            if count <= FEW:
                high = _settle(room, count, high, above, top, heat, target, by_count, FEW)
            at_most = low * 0.0 + float("inf")
        else:
            # Pivots at even distances guarantee progress. After the first pass the sums at both
            # ends of the bracket are known: most pivots go where a straight line meets the
            # target.
            width = high - low
            guess = low * 0.0 + 0.5
            if not is_first:
                guess = (sum_low - target) / tl.maximum(sum_low - sum_high, 1e-30)
                guess = tl.minimum(tl.maximum(guess, 0.0), 1.0)
            close = is_first & is_near
            p0 = tl.where(is_first, low, low + width * tl.maximum(guess - 0.1, 0.0))
            p1 = tl.where(is_first, 0.125, tl.maximum(guess - 0.02, 0.0))
            p1 = low + width * tl.where(close, 0.7, p1)
            p2 = low + width * tl.where(close, 0.76, 0.25)
            p3 = low + width * tl.where(close, 0.8, tl.where(is_first, 0.375, guess))
            p4 = low + width * tl.where(close, 0.83, 0.5)
            p5 = tl.where(is_first, 0.625, tl.minimum(guess + 0.02, 1.0))
            p5 = low + width * tl.where(close, 0.86, p5)
            p6 = low + width * tl.where(close, 0.9, 0.75)
            p7 = tl.where(is_first, 0.875, tl.minimum(guess + 0.1, 1.0))
            p7 = low + width * tl.where(close, 0.95, p7)
            # Eight names and not an array, because Triton cannot index values in registers.
            s0 = tl.zeros([BLOCK], tl.float32)
            s1 = tl.zeros([BLOCK], tl.float32)
            s2 = tl.zeros([BLOCK], tl.float32)
            s3 = tl.zeros([BLOCK], tl.float32)
            s4 = tl.zeros([BLOCK], tl.float32)
            s5 = tl.zeros([BLOCK], tl.float32)
            s6 = tl.zeros([BLOCK], tl.float32)
            s7 = tl.zeros([BLOCK], tl.float32)
            smallest = tl.full([BLOCK], float("inf"), tl.float32)
            largest = tl.full([BLOCK], float("-inf"), tl.float32)
            # In the first pass this is the smallest element of the row.
            floor = tl.where(is_first, float("-inf"), low)
            ahead = read_values(row, tl.arange(0, BLOCK), VOCAB)
            for first in range(0, VOCAB, BLOCK):
                values = ahead.to(tl.float32)
                ahead = read_values(row, first + BLOCK + tl.arange(0, BLOCK), VOCAB)
                weights = _weigh(values, top, heat, by_count)
                # Two instructions per pivot: a comparison to 0.0 or 1.0, and a fused
                # multiply-add.
                s0 += (values > p0).to(tl.float32) * weights
                s1 += (values > p1).to(tl.float32) * weights
                s2 += (values > p2).to(tl.float32) * weights
                s3 += (values > p3).to(tl.float32) * weights
                s4 += (values > p4).to(tl.float32) * weights
                s5 += (values > p5).to(tl.float32) * weights
                s6 += (values > p6).to(tl.float32) * weights
                s7 += (values > p7).to(tl.float32) * weights
                smallest = tl.minimum(smallest, tl.where(values > floor, values, float("inf")))
                largest = tl.maximum(largest, tl.where(values < high, values, float("-inf")))
            a0 = tl.sum(s0, 0)
            if target < 0:
                target = share * a0
            low_element = tl.min(smallest, 0)
            high_element = tl.max(largest, 0)
            if close & by_count & (a0 < target):
                low = _below(low_element)
            elif is_first & (a0 < target):
                # Everything above `low` together is less than the target, so all of it is kept.
                high = low
                going = False
            elif (low_element >= high) | (high_element <= low):
                going = False
            else:
                sum_low = tl.where(is_first, a0, sum_low)
                low, high, sum_low, sum_high = _narrow(
                    p0, a0, target, low, high, sum_low, sum_high
                )
                above = tl.sum(s1, 0)
                low, high, sum_low, sum_high = _narrow(
                    p1, above, target, low, high, sum_low, sum_high
                )
                above = tl.sum(s2, 0)
                low, high, sum_low, sum_high = _narrow(
                    p2, above, target, low, high, sum_low, sum_high
                )
                above = tl.sum(s3, 0)
                low, high, sum_low, sum_high = _narrow(
                    p3, above, target, low, high, sum_low, sum_high
                )
                above = tl.sum(s4, 0)
                low, high, sum_low, sum_high = _narrow(
                    p4, above, target, low, high, sum_low, sum_high
                )
                above = tl.sum(s5, 0)
                low, high, sum_low, sum_high = _narrow(
                    p5, above, target, low, high, sum_low, sum_high
                )
                above = tl.sum(s6, 0)
                low, high, sum_low, sum_high = _narrow(
                    p6, above, target, low, high, sum_low, sum_high
                )
                above = tl.sum(s7, 0)
                low, high, sum_low, sum_high = _narrow(
                    p7, above, target, low, high, sum_low, sum_high
                )
                # No element lies between an end and the nearest one inside, so the ends may move
                # there: a row with few distinct values ends early.
                low = tl.maximum(low, _below(low_element))
                high = tl.minimum(high, _above(high_element))
                middle = low + (high - low) * 0.5
                going = (middle > low) & (middle < high)
                # Their sum over the least weight of one of them.
                at_most = (sum_low - sum_high) / _weigh(low, top, heat, by_count)
                is_first = low == float("inf")
            is_near = low == float("inf")
    return high


@triton.jit
def _top_k_mass(row, least, top, heat, top_k, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Weight of the k largest elements, and the smallest of them. The elements that are
    `least` or more are these k, and all others that are equal to the smallest."""
    count = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    ahead = read_values(row, tl.arange(0, BLOCK), VOCAB)
    for first in range(0, VOCAB, BLOCK):
        values = ahead.to(tl.float32)
        ahead = read_values(row, first + BLOCK + tl.arange(0, BLOCK), VOCAB)
        kept = values >= least
        count += tl.where(kept, 1.0, 0.0)
        mass += tl.where(kept, tl.exp2((values - top) * heat), 0.0)
        smallest = tl.minimum(smallest, tl.where(kept, values, float("inf")))
    last = tl.min(smallest, 0)
    # Elements equal to the last one are all kept, but count only up to k.
    extra = tl.sum(count, 0) - top_k
    return tl.sum(mass, 0) - extra * tl.exp2((last - top) * heat), last


@triton.jit
def find_threshold(row, room, counter, top, heat, top_k, top_p, VOCAB: tl.constexpr,
                   BLOCK: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """The smallest value that top-k, and then top-p, keep; negative infinity if they keep
    all."""
    least = top * 0.0 + float("-inf")
    mass = top * 0.0 - 1.0
    # Weights below 2^-58 do not change a float32 sum.
    low = _below(top - 58.0 / heat)
    at_most = top * 0.0 + float("inf")
    is_near = top < float("inf")  # always true, but a value that the loop can change
    for phase in range(2):  # a loop, so that the search is compiled once
        by_count = phase == 0
        is_asked = tl.where(by_count, (top_k > 0) & (top_k < VOCAB), top_p < 1.0)
        if is_asked:
            begin = tl.where(by_count, _below(top - _REACH), tl.maximum(low, least))
            target = tl.where(by_count, top_k.to(tl.float32), mass)
            least = _search(
                row, room, counter, begin, top, top, heat, by_count, target, top_p, at_most,
                is_near, VOCAB, BLOCK, FEW,
            )  # fmt: skip
            if by_count & (top_p < 1.0):
                mass, last = _top_k_mass(row, least, top, heat, top_k, VOCAB, BLOCK)
                mass = mass * top_p
                least = _below(last)
                at_most = top_k.to(tl.float32)
                is_near = least == float("inf")
    return least
