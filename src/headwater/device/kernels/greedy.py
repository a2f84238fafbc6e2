"""The most likely token of each row; NaN and infinities of a broken model are ignored."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.early import start_early, starts_early

_PARTS = 32


@triton.jit
def _best_of_part(logits, best, place, stride, VOCAB: tl.constexpr, SIZE: tl.constexpr,
                  PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0)
    part = tl.program_id(1)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 2147483647, tl.int32)
    for first in range(0, SIZE, BLOCK):
        at = part * SIZE + first + tl.arange(0, BLOCK)
        inside = (at < VOCAB) & (first + tl.arange(0, BLOCK) < SIZE)
        values = tl.load(logits + row.to(tl.int64) * stride + at, mask=inside, other=0.0)
        values = values.to(tl.float32)
        # Comparisons with NaN are false; infinities are excluded too.
        better = inside & (values > highest) & (values < float("inf"))
        highest = tl.where(better, values, highest)
        where = tl.where(better, at, where)
    top = tl.max(highest, 0)
    first_top = tl.min(tl.where(highest == top, where, 2147483647), 0)
    tl.store(best + row * PARTS + part, top)
    tl.store(place + row * PARTS + part, first_top)


@triton.jit
def _best_of_row(best, place, chosen, PARTS: tl.constexpr, EARLY: tl.constexpr):
    start_early(EARLY)
    row = tl.program_id(0)
    at = row * PARTS + tl.arange(0, PARTS)
    values = tl.load(best + at)
    where = tl.load(place + at)
    top = tl.max(values, 0)
    token = tl.min(tl.where(values == top, where, 2147483647), 0)
    tl.store(chosen + row, tl.where(token == 2147483647, 0, token))


def choose_greedy(logits: Tensor, chosen: Tensor) -> None:
    """Write the most likely token of each row of `logits` to `chosen`; the first among equals.
    Values that are not finite are never chosen; a row without finite values gets token 0."""
    rows, vocab = logits.shape
    best = torch.empty((rows, _PARTS), dtype=torch.float32, device=logits.device)
    place = torch.empty((rows, _PARTS), dtype=torch.int32, device=logits.device)
    size = triton.cdiv(triton.cdiv(vocab, _PARTS), 16) * 16
    early = starts_early(logits)
    _best_of_part[(rows, _PARTS)](
        logits, best, place, logits.stride(0), VOCAB=vocab, SIZE=size, PARTS=_PARTS,
        BLOCK=min(1024, triton.next_power_of_2(size)), EARLY=early, launch_pdl=early,
    )  # fmt: skip
    _best_of_row[(rows,)](best, place, chosen, PARTS=_PARTS, EARLY=early, num_warps=1,
                         launch_pdl=early)  # fmt: skip
