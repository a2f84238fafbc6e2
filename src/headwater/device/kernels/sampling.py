"""Samples a token for each row from its logits, without sorting the vocabulary.

One program computes one row, so the result does not depend on the rest of the batch. It reads
the row several times: the row stays in the second-level cache, and a pass costs a few
microseconds where a sort costs milliseconds.

    pass 1       largest and smallest logit, first index of the largest
    search       8 pivots per pass between `low` and `high`: sums of what is above each pivot
    last pass    sums of kept weights by chunk, in the order of ids; then one chunk in detail

The search keeps two facts: every element at or above `high` is kept, every element at or below
`low` is dropped. When few elements are left between them, these are collected and compared with
each other. It also ends when no float lies between them, so equal elements are kept or dropped together.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

EDITED, RANDOM = 1, 2
"""Bits of a row's `flags`: it uses edited logits; it is sampled randomly."""

PROMPT_BIT = 1 << 14
"""Bit of a count that means that the token occurs in the prompt. The bits below count
outputs."""

MAX_COUNT = PROMPT_BIT - 1

_BLOCK = 2048
_WARPS = 16
_FEW = 256
"""Elements that are collected and compared with each other at the end of a search."""

_EDIT_BLOCK = 4096
_LIST_BLOCK = 128


class SamplingInputs(NamedTuple):
    """Parameters of the rows of a step, on the device; one entry per row. Rows whose `flags`
    are 0 are not changed."""

    flags: Tensor
    top_k: Tensor
    state: Tensor
    """The row of `counts` for the sequence, or -1 without penalties."""

    edit_start: Tensor
    edit_end: Tensor
    """The row's entries of `edit_ids` and `edit_amounts`."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    edit_ids: Tensor
    edit_amounts: Tensor
    """Added to logits; negative infinity forbids a token. Ids of one row are distinct."""

    mask: Tensor
    """The row of `masks` with the tokens that a row may choose, or -1 for all."""

    masks: Tensor
    """`[rows, words]`, int32: one bit per token, 32 in a word, lowest bit first."""

    counts: Tensor
    """`[states, vocab]`, int16: `PROMPT_BIT` and the number of outputs, of each token."""


@triton.jit
def _allowed(words, at, inside):
    """Whether the bits of a mask are set."""
    return (tl.load(words + at // 32, mask=inside, other=0) >> (at % 32)) & 1 != 0


@triton.jit
def _edit(logits, edited, flags, state, repetition, presence, frequency, mask, masks, counts,
          stride, VOCAB: tl.constexpr, WORDS: tl.constexpr, PROMPT: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Copy a row's logits as float32, with penalties; tokens that are masked out are impossible."""
    row = tl.program_id(0)
    if tl.load(flags + row) & 1 == 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCAB
    values = tl.load(logits + row.to(tl.int64) * stride + at, mask=inside).to(tl.float32)
    slot = tl.load(state + row).to(tl.int64)
    if slot >= 0:
        count = tl.load(counts + slot * VOCAB + at, mask=inside, other=0).to(tl.int32)
        factor = tl.load(repetition + row)
        repeated = tl.where(values > 0, values / factor, values * factor)
        values = tl.where(count != 0, repeated, values)
        outputs = (count & (PROMPT - 1)).to(tl.float32)
        amount = tl.load(presence + row) + tl.load(frequency + row) * outputs
        values = tl.where(outputs > 0, values - amount, values)
    mask_row = tl.load(mask + row)
    if mask_row >= 0:
        is_allowed = _allowed(masks + mask_row * WORDS, at, inside)
        values = tl.where(is_allowed, values, float("-inf"))
    tl.store(edited + row.to(tl.int64) * VOCAB + at, values, mask=inside)


@triton.jit
def _add_listed(edited, flags, edit_start, edit_end, edit_ids, edit_amounts,
                VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add the row's listed amounts: biases, and negative infinity for forbidden tokens."""
    row = tl.program_id(0)
    # The host sends no range for other rows: theirs may be anything.
    if tl.load(flags + row) & 1 == 0:
        return
    end = tl.load(edit_end + row)
    for first in range(tl.load(edit_start + row), end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(edit_ids + at, mask=at < end, other=VOCAB)
        amount = tl.load(edit_amounts + at, mask=at < end, other=0.0)
        place = edited + row.to(tl.int64) * VOCAB + token
        known = (token >= 0) & (token < VOCAB)
        values = tl.load(place, mask=known, other=0.0)
        tl.store(place, values + amount, mask=known)


@triton.jit
def _read(row, at, VOCAB: tl.constexpr):
    """Values of a row; negative infinity after the end. Loops read one block ahead, so that the
    next values are being loaded while these are used."""
    return tl.load(row + at, mask=at < VOCAB, other=float("-inf"))


@triton.jit
def _extremes(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Largest finite value, its first index (2^31 - 1 if there is none), smallest finite value,
    and whether the row has a NaN or a positive infinity."""
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    where = tl.full([BLOCK], 2147483647, tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    ahead = _read(row, tl.arange(0, BLOCK), VOCAB)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = ahead.to(tl.float32)
        ahead = _read(row, at + BLOCK, VOCAB)
        # Comparisons with NaN are false, so NaN is neither finite nor better.
        is_finite = (values > float("-inf")) & (values < float("inf"))
        better = is_finite & (values > highest)
        highest = tl.where(better, values, highest)
        where = tl.where(better, at, where)
        lowest = tl.where(is_finite & (values < lowest), values, lowest)
        broken = broken | tl.where(is_finite | (values == float("-inf")), 0, 1)
    top = tl.max(highest, 0)
    token = tl.min(tl.where(highest == top, where, 2147483647), 0)
    return top, token, tl.min(lowest, 0), tl.max(broken, 0)


@triton.jit
def _best_allowed(row, words, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """First index of the largest finite value that a mask allows; 2^31 - 1 if there is none."""
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 2147483647, tl.int32)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = _read(row, at, VOCAB).to(tl.float32)
        better = (values > highest) & (values < float("inf")) & _allowed(words, at, at < VOCAB)
        highest = tl.where(better, values, highest)
        where = tl.where(better, at, where)
    return tl.min(tl.where(highest == tl.max(highest, 0), where, 2147483647), 0)


@triton.jit
def _below(value):
    # Two float32 steps below, so that the element itself is above the result.
    return value - tl.abs(value) * 2.4e-7 - 1e-37


@triton.jit
def _above(value):
    return value + tl.abs(value) * 2.4e-7 + 1e-37


@triton.jit
def _narrow(pivot, above, target, low, high, sum_low, sum_high):
    """The bracket after one pivot: elements that reach the target are dropped, the others are
    kept."""
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
    """The least kept value among collected elements, of which `above` lies above.

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
def _search(row, room, counter, low, high, top, heat, by_count, target, share,
            VOCAB: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """The smallest `high` such that less than the target lies above each element it keeps.

    Elements are counted, or their weights are summed. A negative
    `target` stands for `share` of the sum over everything above `low`.
    """
    sum_low = low * 0.0
    sum_high = low * 0.0
    # Most elements that can be between `low` and `high`: their sum over the least weight.
    at_most = low * 0.0 + VOCAB
    is_first = low < float("inf")  # always true, but a value that the loop can change
    going = low < high
    while going:
        # Pivots at even distances guarantee progress. After the first pass the sums at both ends
        # of the bracket are known: most pivots go where a straight line meets the target.
        width = high - low
        guess = low * 0.0 + 0.5
        if not is_first:
            guess = (sum_low - target) / tl.maximum(sum_low - sum_high, 1e-30)
            guess = tl.minimum(tl.maximum(guess, 0.0), 1.0)
        p0 = tl.where(is_first, low, low + width * tl.maximum(guess - 0.06, 0.0))
        p1 = low + width * tl.where(is_first, 0.125, tl.maximum(guess - 0.008, 0.0))
        p2 = low + width * 0.25
        p3 = low + width * tl.where(is_first, 0.375, guess)
        p4 = low + width * 0.5
        p5 = low + width * tl.where(is_first, 0.625, tl.minimum(guess + 0.008, 1.0))
        p6 = low + width * 0.75
        p7 = low + width * tl.where(is_first, 0.875, tl.minimum(guess + 0.06, 1.0))
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
        over = tl.zeros([BLOCK], tl.float32)
        collects = at_most <= FEW
        if collects:
            tl.store(counter, 0)
            tl.debug_barrier()
        ahead = _read(row, tl.arange(0, BLOCK), VOCAB)
        for first in range(0, VOCAB, BLOCK):
            values = ahead.to(tl.float32)
            ahead = _read(row, first + BLOCK + tl.arange(0, BLOCK), VOCAB)
            weights = _weigh(values, top, heat, by_count)
            if collects:
                over += tl.where(values > high, weights, 0.0)
                found = (values > low) & (values <= high)
                place = tl.atomic_add(
                    counter + tl.zeros([BLOCK], tl.int32), 1, mask=found, sem="relaxed"
                )
                tl.store(room + place, values, mask=found & (place < FEW))
            # Two instructions per pivot: a comparison to 0.0 or 1.0, and a fused multiply-add.
            s0 += (values > p0).to(tl.float32) * weights
            s1 += (values > p1).to(tl.float32) * weights
            s2 += (values > p2).to(tl.float32) * weights
            s3 += (values > p3).to(tl.float32) * weights
            s4 += (values > p4).to(tl.float32) * weights
            s5 += (values > p5).to(tl.float32) * weights
            s6 += (values > p6).to(tl.float32) * weights
            s7 += (values > p7).to(tl.float32) * weights
            smallest = tl.minimum(smallest, tl.where(values > low, values, float("inf")))
            largest = tl.maximum(largest, tl.where(values < high, values, float("-inf")))
        a0 = tl.sum(s0, 0)
        if target < 0:
            target = share * a0
        low_element = tl.min(smallest, 0)
        high_element = tl.max(largest, 0)
        num_collected = FEW + 1
        if collects:
            tl.debug_barrier()
            num_collected = tl.load(counter, cache_modifier=".cg")
        if num_collected <= FEW:
            high = _settle(
                room, num_collected, high, tl.sum(over, 0), top, heat, target, by_count, FEW
            )
            going = False
        elif is_first & (a0 < target):
            # Everything above `low` together is less than the target, so all of it is kept.
            high = low
            going = False
        elif (low_element >= high) | (high_element <= low):
            going = False
        else:
            sum_low = tl.where(is_first, a0, sum_low)
            low, high, sum_low, sum_high = _narrow(p0, a0, target, low, high, sum_low, sum_high)
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
            at_most = (sum_low - sum_high) / _weigh(low, top, heat, by_count)
        is_first = low == float("inf")
    return high


@triton.jit
def _top_k_mass(row, least, top, heat, top_k, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Weight of exactly k elements among those from `least` on, and the smallest of them."""
    count = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    ahead = _read(row, tl.arange(0, BLOCK), VOCAB)
    for first in range(0, VOCAB, BLOCK):
        values = ahead.to(tl.float32)
        ahead = _read(row, first + BLOCK + tl.arange(0, BLOCK), VOCAB)
        kept = values >= least
        count += tl.where(kept, 1.0, 0.0)
        mass += tl.where(kept, tl.exp2((values - top) * heat), 0.0)
        smallest = tl.minimum(smallest, tl.where(kept, values, float("inf")))
    last = tl.min(smallest, 0)
    # Elements equal to the last one are all kept, but count only up to k.
    extra = tl.sum(count, 0) - top_k
    return tl.sum(mass, 0) - extra * tl.exp2((last - top) * heat), last


@triton.jit
def _threshold(row, room, counter, top, bottom, heat, top_k, top_p, VOCAB: tl.constexpr,
               BLOCK: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """The smallest value that top-k, and then top-p, keep."""
    least = _below(bottom)
    mass = top * 0.0 - 1.0
    for phase in range(2):  # a loop, so that the search is compiled once
        by_count = phase == 0
        is_asked = tl.where(by_count, (top_k > 0) & (top_k < VOCAB), top_p < 1.0)
        if is_asked:
            # Weights below 2^-58 do not change a float32 sum.
            lightest = tl.maximum(least, _below(top - 58.0 / heat))
            low = tl.where(by_count, least, lightest)
            target = tl.where(by_count, top_k.to(tl.float32), mass)
            least = _search(
                row, room, counter, low, top, top, heat, by_count, target, top_p, VOCAB, BLOCK,
                FEW,
            )  # fmt: skip
            if by_count & (top_p < 1.0):
                mass, last = _top_k_mass(row, least, top, heat, top_k, VOCAB, BLOCK)
                mass = mass * top_p
                least = _below(last)
    return least


@triton.jit
def _weights(values, least, top, heat, min_p):
    weights = tl.exp2((values - top) * heat)
    return tl.where((values >= least) & (weights >= min_p), weights, 0.0)


@triton.jit
def _draw(row, least, top, heat, min_p, uniform, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
          CHUNKS: tl.constexpr):  # fmt: skip
    """Invert the cumulative distribution, in the order of ids, at `uniform`."""
    number = tl.arange(0, CHUNKS)
    sums = tl.zeros([CHUNKS], tl.float32)
    ahead = _read(row, tl.arange(0, BLOCK), VOCAB)
    for first in range(0, VOCAB, BLOCK):
        weights = _weights(ahead.to(tl.float32), least, top, heat, min_p)
        ahead = _read(row, first + BLOCK + tl.arange(0, BLOCK), VOCAB)
        sums = tl.where(number == first // BLOCK, tl.sum(weights, 0), sums)
    ends = tl.cumsum(sums, 0)
    total = tl.max(ends, 0)
    # The product may round up to the total, after which there is no token.
    goal = tl.minimum(uniform * total, total * 0.99999994)
    chunk = tl.sum((ends <= goal).to(tl.int32), 0)
    begin = tl.max(tl.where(number < chunk, ends, 0.0), 0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    weights = _weights(_read(row, at, VOCAB).to(tl.float32), least, top, heat, min_p)
    passed = begin + tl.cumsum(weights, 0) <= goal
    # Sums of a chunk in two orders may differ in the last bit; make sure that the token is a
    # kept one.
    last = tl.max(tl.where(weights > 0, at, 0), 0)
    return tl.minimum(chunk * BLOCK + tl.sum(passed.to(tl.int32), 0), last)


@triton.jit
def _choose(row, room, counter, asked, warmth, top_k, top_p, min_p, uniform,
            VOCAB: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """The token of a row; 2^31 - 1 if no value is finite."""
    top, token, bottom, broken = _extremes(row, VOCAB, BLOCK)
    if (token < 2147483647) & (asked & 2 != 0) & (broken == 0) & (warmth > 0):
        heat = 1.4426950408889634 / warmth
        least = _threshold(
            row, room, counter, top, bottom, heat, top_k, top_p, VOCAB, BLOCK, FEW
        )
        token = _draw(row, least, top, heat, min_p, uniform, VOCAB, BLOCK, CHUNKS)
    return token


@triton.jit
def _sample(logits, edited, chosen, rooms, counters, flags, top_k, state, temperature, top_p,
            min_p, uniform, mask, masks, counts, stride, VOCAB: tl.constexpr,
            WORDS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    asked = tl.load(flags + program)
    if asked == 0:
        return
    number = program.to(tl.int64)
    own = logits + number * stride
    room, counter = rooms + number * FEW, counters + number
    warmth, k = tl.load(temperature + program), tl.load(top_k + program)
    p, least_p = tl.load(top_p + program), tl.load(min_p + program)
    chance = tl.load(uniform + program)
    if asked & 1 != 0:
        row = edited + number * VOCAB
        token = _choose(
            row, room, counter, asked, warmth, k, p, least_p, chance, VOCAB, BLOCK, CHUNKS, FEW,
        )  # fmt: skip
        if token == 2147483647:
            # Every token is forbidden: the model's own logits decide, within the mask.
            mask_row = tl.load(mask + program)
            if mask_row >= 0:
                token = _best_allowed(own, masks + mask_row * WORDS, VOCAB, BLOCK)
            else:
                _, token, _, _ = _extremes(own, VOCAB, BLOCK)
    else:
        token = _choose(
            own, room, counter, asked, warmth, k, p, least_p, chance, VOCAB, BLOCK, CHUNKS, FEW,
        )  # fmt: skip
    token = tl.where(token == 2147483647, 0, token)
    tl.store(chosen + program, token)
    slot = tl.load(state + program).to(tl.int64)
    if slot >= 0:
        # The next step of this sequence penalises the token without the host.
        place = counts + slot * VOCAB + token
        count = tl.load(place)
        if (count & MOST) < MOST:
            tl.store(place, count + 1)


class SamplingScratch:
    """Scratch memory of the kernels, for this many rows."""

    def __init__(self, num_rows: int, vocab: int, device: torch.device) -> None:
        shape = num_rows, vocab
        self.edited = torch.empty(shape, dtype=torch.float32, device=device)
        self.rooms = torch.empty((num_rows, _FEW), dtype=torch.float32, device=device)
        self.counters = torch.zeros(num_rows, dtype=torch.int32, device=device)


def choose_sampled(
    logits: Tensor,
    chosen: Tensor,
    inputs: SamplingInputs,
    scratch: SamplingScratch,
    num_rows: int,
) -> None:
    """Write the token of each row that is sampled to `chosen`. Counts of sampled tokens are
    updated."""
    vocab = logits.shape[1]
    _edit[(num_rows, triton.cdiv(vocab, _EDIT_BLOCK))](
        logits, scratch.edited, inputs.flags, inputs.state, inputs.repetition, inputs.presence,
        inputs.frequency, inputs.mask, inputs.masks, inputs.counts, logits.stride(0),
        VOCAB=vocab, WORDS=inputs.masks.shape[1], PROMPT=PROMPT_BIT,
        BLOCK=_EDIT_BLOCK, num_warps=8,
    )  # fmt: skip
    _add_listed[(num_rows,)](
        scratch.edited, inputs.flags, inputs.edit_start, inputs.edit_end, inputs.edit_ids,
        inputs.edit_amounts, VOCAB=vocab, BLOCK=_LIST_BLOCK,
    )  # fmt: skip
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _sample[(num_rows,)](
        logits, scratch.edited, chosen, scratch.rooms, scratch.counters, inputs.flags,
        inputs.top_k, inputs.state, inputs.temperature, inputs.top_p, inputs.min_p,
        inputs.uniform, inputs.mask, inputs.masks, inputs.counts, logits.stride(0),
        VOCAB=vocab, WORDS=inputs.masks.shape[1], MOST=MAX_COUNT,
        BLOCK=block, CHUNKS=triton.next_power_of_2(triton.cdiv(vocab, block)), FEW=_FEW,
        num_warps=_WARPS,
    )  # fmt: skip


def make_counts(num_states: int, vocab: int, device: torch.device) -> Tensor:
    """Counts of every token for this many sequences, set to zero."""
    return torch.zeros((num_states, vocab), dtype=torch.int16, device=device)
