"""Edits of logits before sampling: penalties, masks, biases and forbidden tokens."""

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
def allowed(words, at, inside):
    """Whether the bits of a mask are set."""
    return (tl.load(words + at // 32, mask=inside, other=0) >> (at % 32)) & 1 != 0


@triton.jit
def _edit(logits, edited, flags, state, repetition, presence, frequency, mask, masks, counts,
          stride, VOCAB: tl.constexpr, WORDS: tl.constexpr, PROMPT: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Copy a row's logits as float32, with penalties; tokens that the mask forbids get negative
    infinity."""
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
        isallowed = allowed(masks + mask_row * WORDS, at, inside)
        values = tl.where(isallowed, values, float("-inf"))
    tl.store(edited + row.to(tl.int64) * VOCAB + at, values, mask=inside)


@triton.jit
def _add_listed(edited, flags, edit_start, edit_end, edit_ids, edit_amounts,
                VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add the row's listed amounts: biases, and negative infinity for forbidden tokens."""
    row = tl.program_id(0)
    # The host sends no range for rows without edits, so their range is undefined.
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


def edit_logits(logits: Tensor, edited: Tensor, inputs: SamplingInputs, num_rows: int) -> None:
    """Write the edited logits of rows with edits to `edited`, as float32."""
    vocab = logits.shape[1]
    _edit[(num_rows, triton.cdiv(vocab, _EDIT_BLOCK))](
        logits, edited, inputs.flags, inputs.state, inputs.repetition, inputs.presence,
        inputs.frequency, inputs.mask, inputs.masks, inputs.counts, logits.stride(0),
        VOCAB=vocab, WORDS=inputs.masks.shape[1], PROMPT=PROMPT_BIT,
        BLOCK=_EDIT_BLOCK, num_warps=8,
    )  # fmt: skip
    _add_listed[(num_rows,)](
        edited, inputs.flags, inputs.edit_start, inputs.edit_end, inputs.edit_ids,
        inputs.edit_amounts, VOCAB=vocab, BLOCK=_LIST_BLOCK,
    )  # fmt: skip


def make_counts(num_states: int, vocab: int, device: torch.device) -> Tensor:
    """Counts of every token for this many sequences, set to zero."""
    return torch.zeros((num_states, vocab), dtype=torch.int16, device=device)
