"""Log-probabilities of chosen tokens and of the most likely ones, for rows that request them.

Each row is cut into parts; a program finds the most likely tokens of its part by taking the
largest again and again, which is cheaper than a sort for the few that are requested. A second
kernel joins the parts of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOP = 32
"""Maximum number of most likely tokens that a row can request."""

_PARTS = 32
_FIELDS = 2 + 2 * MAX_TOP

NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _finite(values):
    """NaN and infinities count as impossible."""
    return tl.where((values > float("-inf")) & (values < float("inf")), values, float("-inf"))


@triton.jit
def _top_of_part(logits, chosen, num_top, part_sums, part_values, part_ids, stride,
                 VOCAB: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
                 TOP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wanted = tl.load(num_top + row)
    if wanted < 0:
        return
    of_part = tl.arange(0, BLOCK)
    at = part * SIZE + of_part
    inside = (of_part < SIZE) & (at < VOCAB)
    values = tl.load(logits + row * stride + at, mask=inside, other=float("-inf"))
    values = _finite(values.to(tl.float32))
    picked = tl.load(logits + row * stride + tl.load(chosen + row)).to(tl.float32)
    highest = tl.max(values, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    place = (row * PARTS + part) * 3
    tl.store(part_sums + place, highest)
    tl.store(part_sums + place + 1, tl.sum(tl.exp(values - base), 0))
    tl.store(part_sums + place + 2, tl.sum((values > picked).to(tl.float32), 0))
    for number in range(wanted):
        best = tl.max(values, 0)
        token = tl.min(tl.where((values == best) & inside, at, NO_TOKEN), 0)
        into = (row * PARTS + part) * TOP + number
        tl.store(part_values + into, best)
        tl.store(part_ids + into, token)
        values = tl.where(at == token, float("-inf"), values)
        inside = inside & (at != token)


@triton.jit
def _join(logits, chosen, num_top, part_sums, part_values, part_ids, out, stride,
          PARTS: tl.constexpr, TOP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(num_top + row)
    if wanted < 0:
        return
    part = tl.arange(0, PARTS)
    sums = part_sums + (row * PARTS + part) * 3
    levels = tl.load(sums)
    highest = tl.max(levels, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.load(sums + 1) * tl.exp(levels - base), 0)
    level = base + tl.log(total)
    picked = _finite(tl.load(logits + row * stride + tl.load(chosen + row)).to(tl.float32))
    # A row without one finite logit has no probabilities: all are reported as impossible.
    share = tl.where(total > 0, picked - level, float("-inf"))
    rank = 1 + tl.sum(tl.load(sums + 2), 0).to(tl.int32)
    result = out + row * (2 + 2 * TOP)
    tl.store(result, share.to(tl.int32, bitcast=True))
    tl.store(result + 1, rank)
    entry = tl.arange(0, PARTS * TOP)
    known = entry % TOP < wanted
    source = row * PARTS * TOP + entry
    values = tl.load(part_values + source, mask=known, other=float("-inf"))
    ids = tl.load(part_ids + source, mask=known, other=NO_TOKEN)
    for number in range(wanted):
        best = tl.max(values, 0)
        token = tl.min(tl.where(values == best, ids, NO_TOKEN), 0)
        share = tl.where(total > 0, best - level, float("-inf"))
        tl.store(result + 2 + number, share.to(tl.int32, bitcast=True))
        tl.store(result + 2 + TOP + number, token)
        taken = ids == token
        values = tl.where(taken, float("-inf"), values)
        ids = tl.where(taken, NO_TOKEN, ids)


class LogprobBuffers:
    """Memory for the results of this many rows, and for the parts they are joined from."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self.sums = floats(num_rows, _PARTS, 3)
        self.values = floats(num_rows, _PARTS, MAX_TOP)
        self.ids = torch.empty(self.values.shape, dtype=torch.int32, device=device)
        self.out = torch.zeros((num_rows, _FIELDS), dtype=torch.int32, device=device)
        """Per row: log-probability (bits of a float32) and rank of the chosen token, then the
        log-probabilities of the top tokens, then their ids."""


def find_logprobs(
    logits: Tensor, chosen: Tensor, num_top: Tensor, buffers: LogprobBuffers, num_rows: int
) -> None:
    """Fill `buffers.out` for the rows whose `num_top` is not negative."""
    vocab = logits.shape[1]
    size = triton.cdiv(vocab, _PARTS)
    _top_of_part[(num_rows, _PARTS)](
        logits, chosen, num_top, buffers.sums, buffers.values, buffers.ids, logits.stride(0),
        VOCAB=vocab, SIZE=size, PARTS=_PARTS, TOP=MAX_TOP, BLOCK=triton.next_power_of_2(size),
    )  # fmt: skip
    _join[(num_rows,)](
        logits, chosen, num_top, buffers.sums, buffers.values, buffers.ids, buffers.out,
        logits.stride(0), PARTS=_PARTS, TOP=MAX_TOP,
    )  # fmt: skip
