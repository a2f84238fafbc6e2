"""Samples a token for each row from its logits, without sorting the vocabulary.

One program computes one row, so the result does not depend on the rest of the batch. It reads
the row several times: the row stays in the second-level cache, and a pass costs a few
microseconds where a sort costs milliseconds.

    pass 1       only of edited rows: the largest logit and its first index; the forward pass has
                 chosen the most likely token of the others
    search       the least value that top-k and top-p keep (`threshold`)
    last pass    sums of kept weights by chunk, in the order of ids; then one chunk in detail
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.logit_edits import (
    MAX_COUNT,
    SamplingInputs,
    allowed,
    edit_logits,
)
from headwater.device.kernels.threshold import FEW, find_threshold, read_values

_BLOCK = 2048
_WARPS = 16


@triton.jit
def _largest(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Largest finite value and its first index, which is 2^31 - 1 if there is none."""
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 2147483647, tl.int32)
    ahead = read_values(row, tl.arange(0, BLOCK), VOCAB)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = ahead.to(tl.float32)
        ahead = read_values(row, at + BLOCK, VOCAB)
        # Comparisons with NaN are false, so NaN is not better.
        better = (values > highest) & (values < float("inf"))
        highest = tl.where(better, values, highest)
        where = tl.where(better, at, where)
    top = tl.max(highest, 0)
    return top, tl.min(tl.where(highest == top, where, 2147483647), 0)


@triton.jit
def _best_allowed(row, words, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """First index of the largest finite value that a mask allows; 2^31 - 1 if there is none."""
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 2147483647, tl.int32)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = read_values(row, at, VOCAB).to(tl.float32)
        better = (values > highest) & (values < float("inf")) & allowed(words, at, at < VOCAB)
        highest = tl.where(better, values, highest)
        where = tl.where(better, at, where)
    return tl.min(tl.where(highest == tl.max(highest, 0), where, 2147483647), 0)


@triton.jit
def _weights(values, least, top, heat, min_p):
    weights = tl.exp2((values - top) * heat)
    return tl.where((values >= least) & (weights >= min_p), weights, 0.0)


@triton.jit
def _draw(row, least, top, heat, min_p, uniform, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
          CHUNKS: tl.constexpr):  # fmt: skip
    """Invert the cumulative distribution, in the order of ids, at `uniform`. Also returns whether
    the row has a NaN or a positive infinity."""
    number = tl.arange(0, CHUNKS)
    broken = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([CHUNKS], tl.float32)
    ahead = read_values(row, tl.arange(0, BLOCK), VOCAB)
    for first in range(0, VOCAB, BLOCK):
        values = ahead.to(tl.float32)
        broken = broken | tl.where(values < float("inf"), 0, 1)
        weights = _weights(values, least, top, heat, min_p)
        ahead = read_values(row, first + BLOCK + tl.arange(0, BLOCK), VOCAB)
        sums = tl.where(number == first // BLOCK, tl.sum(weights, 0), sums)
    ends = tl.cumsum(sums, 0)
    total = tl.max(ends, 0)
    # The product may round up to the total, after which there is no token.
    goal = tl.minimum(uniform * total, total * 0.99999994)
    chunk = tl.sum((ends <= goal).to(tl.int32), 0)
    begin = tl.max(tl.where(number < chunk, ends, 0.0), 0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    weights = _weights(read_values(row, at, VOCAB).to(tl.float32), least, top, heat, min_p)
    passed = begin + tl.cumsum(weights, 0) <= goal
    # Sums of a chunk in two orders may differ in the last bit; make sure that the token is a
    # kept one.
    last = tl.max(tl.where(weights > 0, at, 0), 0)
    token = tl.minimum(chunk * BLOCK + tl.sum(passed.to(tl.int32), 0), last)
    return token, tl.max(broken, 0) > 0


@triton.jit
def _choose(row, top, token, room, counter, asked, warmth, top_k, top_p, min_p, uniform,
            VOCAB: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """The token of a row, whose largest finite value is `top`, at `token`."""
    if (tl.abs(top) < float("inf")) & (asked & 2 != 0) & (warmth > 0):
        heat = 1.4426950408889634 / warmth
        least = find_threshold(row, room, counter, top, heat, top_k, top_p, VOCAB, BLOCK, FEW)
        drawn, broken = _draw(row, least, top, heat, min_p, uniform, VOCAB, BLOCK, CHUNKS)
        token = tl.where(broken, token, drawn)
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
        top, token = _largest(row, VOCAB, BLOCK)
        token = _choose(
            row, top, token, room, counter, asked, warmth, k, p, least_p, chance, VOCAB, BLOCK,
            CHUNKS, FEW,
        )  # fmt: skip
        if token == 2147483647:
            # Every token is forbidden: the model's own logits decide, within the mask.
            mask_row = tl.load(mask + program)
            if mask_row >= 0:
                token = _best_allowed(own, masks + mask_row * WORDS, VOCAB, BLOCK)
            else:
                token = tl.load(chosen + program)
    else:
        token = tl.load(chosen + program)
        top = tl.load(own + token).to(tl.float32)
        token = _choose(
            own, top, token, room, counter, asked, warmth, k, p, least_p, chance, VOCAB, BLOCK,
            CHUNKS, FEW,
        )  # fmt: skip
    # All threads have read the most likely token before it is overwritten.
    tl.debug_barrier()
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
        self.rooms = torch.empty((num_rows, FEW), dtype=torch.float32, device=device)
        self.counters = torch.zeros(num_rows, dtype=torch.int32, device=device)


def choose_sampled(
    logits: Tensor,
    chosen: Tensor,
    inputs: SamplingInputs,
    scratch: SamplingScratch,
    num_rows: int,
) -> None:
    """Write the token of each row that is sampled to `chosen`, which holds the most likely token
    of each row. Counts of sampled tokens are updated."""
    vocab = logits.shape[1]
    edit_logits(logits, scratch.edited, inputs, num_rows)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _sample[(num_rows,)](
        logits, scratch.edited, chosen, scratch.rooms, scratch.counters, inputs.flags,
        inputs.top_k, inputs.state, inputs.temperature, inputs.top_p, inputs.min_p,
        inputs.uniform, inputs.mask, inputs.masks, inputs.counts, logits.stride(0),
        VOCAB=vocab, WORDS=inputs.masks.shape[1], MOST=MAX_COUNT,
        BLOCK=block, CHUNKS=triton.next_power_of_2(triton.cdiv(vocab, block)), FEW=FEW,
        num_warps=_WARPS,
    )  # fmt: skip
