"""Edits of logits before a token is chosen: penalties, then biases, then forbidden tokens.

Vectorised: the parameters of all rows become index arrays over the whole batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.device.kv import Ints
from headwater.device.upload import put
from headwater.scheduler.request import SamplingParams
from headwater.types import Tokens

History = tuple[Tokens, int]
"""All tokens of a row so far, and how many of them are the prompt."""


def is_penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def penalise(
    logits: Tensor, params: Sequence[SamplingParams], histories: dict[int, History]
) -> None:
    """Lower the logits of tokens that a row already contains, in place; `histories` has the
    rows to change.

    Repetition counts prompt and output; presence and frequency count the output only.
    """
    rows = list(histories)
    vocab = logits.shape[1]
    seen = _counted([histories[row][0] for row in rows], rows, vocab)
    output = _counted([h[0][h[1] :] for h in histories.values()], rows, vocab)
    repetition = np.array([p.repetition_penalty for p in params], dtype=np.float32)
    presence = np.array([p.presence_penalty for p in params], dtype=np.float32)
    frequency = np.array([p.frequency_penalty for p in params], dtype=np.float32)
    flat = logits.view(-1)
    at = _tensor(seen[0], logits)
    values = flat[at]
    factor = _tensor(repetition[seen[0] // vocab], logits)
    flat[at] = torch.where(values > 0, values / factor, values * factor)
    by_row = output[0] // vocab
    flat[_tensor(output[0], logits)] -= _tensor(
        presence[by_row] + frequency[by_row] * output[1].astype(np.float32), logits
    )


def bias(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Add each row's `logit_bias`, in place. Ids outside the vocabulary are ignored."""
    vocab = logits.shape[1]
    places, amounts = [], []
    for row, row_params in enumerate(params):
        for token, amount in row_params.logit_bias.items():
            if 0 <= token < vocab:
                places.append(row * vocab + token)
                amounts.append(amount)
    if places:
        at = put(np.array(places), logits.device)
        logits.view(-1)[at] += put(np.array(amounts, dtype=np.float32), logits.device)


def forbid(logits: Tensor, tokens: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Make tokens impossible, in place. Each entry is a row and its forbidden token ids."""
    vocab = logits.shape[1]
    places = [row * vocab + token for row, ids in tokens for token in ids if 0 <= token < vocab]
    if places:
        logits.view(-1)[put(np.array(places), logits.device)] = float("-inf")


def keep_allowed(logits: Tensor, rows: Sequence[int], words: NDArray[np.int32]) -> Tensor:
    """The logits, with every token impossible that the mask of its row does not allow.

    `words` has one bit per token, lowest first, in a row for each of `rows`. The given logits
    are not changed.
    """
    vocab = logits.shape[1]
    if logits.device.type == "cpu":
        unpacked = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        bits = torch.from_numpy(unpacked).bool()
    else:
        shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
        packed = put(words, logits.device)
        bits = ((packed[:, :, None] >> shifts) & 1).bool().view(len(words), -1)
    allowed = torch.zeros((len(words), vocab), dtype=torch.bool, device=logits.device)
    width = min(vocab, bits.shape[1])
    allowed[:, :width] = bits[:, :width]
    if len(rows) == len(logits) and list(rows) == list(range(len(rows))):
        return torch.where(allowed, logits, -torch.inf)
    at = put(np.array(rows), logits.device)
    masked = torch.where(allowed, logits.index_select(0, at), -torch.inf)
    return logits.index_copy(0, at, masked)


def _counted(tokens: list[Tokens], rows: list[int], vocab: int) -> tuple[Ints, Ints]:
    """Distinct (row, token) pairs as `row * vocab + token`, and how often each occurs."""
    counts = [len(row_tokens) for row_tokens in tokens]
    places = np.repeat(np.array(rows, dtype=np.int64) * vocab, counts)
    places += np.concatenate(tokens) if tokens else 0
    distinct, often = np.unique(places, return_counts=True)
    return distinct, often.astype(np.int64)


def _tensor(values: NDArray[np.int64] | NDArray[np.float32], like: Tensor) -> Tensor:
    return put(values, like.device)
