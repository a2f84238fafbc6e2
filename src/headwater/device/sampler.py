"""Samples the next token of each row. Vectorised over the batch, without state.

The order is: penalties, biases and forbidden tokens; temperature; top-k; top-p of those; then
tokens at least `min_p` times as likely as the most likely one. Tokens with the same probability
as the last kept one are kept too, so the order of ids does not matter.

A row whose largest logit is not finite (the model overflowed, or every token is forbidden) is
greedy over the finite ones: of the edited logits, otherwise of the model's logits, otherwise
token 0. Other rows are not affected.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwater.device.counter_random import uniform
from headwater.device.kv import Ints
from headwater.device.penalties import (
    History,
    bias,
    forbid,
    is_penalised,
    keep_allowed,
    penalise,
)
from headwater.device.upload import fetch, put
from headwater.engine.masks import StepMasks
from headwater.scheduler.request import SamplingParams, TokenLogprobs
from headwater.types import Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledRows:
    """The rows of a step that are sampled; all fields are per row."""

    params: Sequence[SamplingParams]
    positions: Ints
    """Position of the sampled token in its sequence."""

    prompt_lens: Sequence[int]
    histories: dict[int, History]
    """Histories of the penalised rows."""

    masks: StepMasks | None = None
    """Masks of the rows with a grammar; None if there are none."""


class Sampler:
    """Chooses tokens for a model with these end-of-sequence ids."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def choose(
        self, logits: Tensor, rows: SampledRows
    ) -> tuple[Tokens, list[TokenLogprobs | None]]:
        """A token for each row of `logits`, and log-probabilities if requested."""
        chosen = self.pick(logits, rows)
        logprobs = LogprobTable(logits, chosen, [p.logprobs for p in rows.params])
        tokens: Tokens = chosen.cpu().numpy().astype(np.int32)
        return tokens, logprobs.read()

    def pick(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """The token of each row, on the device of the logits; does not wait for the device."""
        if is_plain(rows.params):
            return _greedy(logits, logits)
        if rows.masks is not None and rows.masks.rows:
            # Masks come first, and the fallback to the model's logits uses masked ones too: no
            # later edit may allow a forbidden token again.
            logits = keep_allowed(logits.float(), rows.masks.rows, rows.masks.words)
        edited = self._edited(logits.float(), rows)
        chosen = _greedy(edited, logits)
        random = [row for row, params in enumerate(rows.params) if not params.is_greedy]
        if random:
            at = put(np.array(random), logits.device)
            best = chosen.index_select(0, at)
            drawn = _draw(
                edited.index_select(0, at),
                best,
                [rows.params[row] for row in random],
                rows.positions[random],
            )
            chosen.index_copy_(0, at, drawn)
        return chosen

    def _edited(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """The edited logits; the given ones are not changed."""
        biased = any(params.logit_bias for params in rows.params)
        forbidden = self._forbidden(rows)
        if not (rows.histories or biased or forbidden):
            return logits
        edited = logits.clone()
        if rows.histories:
            penalise(edited, rows.params, rows.histories)
        if biased:
            bias(edited, rows.params)
        forbid(edited, forbidden)
        return edited

    def _forbidden(self, rows: SampledRows) -> list[tuple[int, tuple[int, ...]]]:
        """End tokens of rows that must not end yet."""
        forbidden = []
        for row, params in enumerate(rows.params):
            if params.min_tokens == 0:
                continue
            if int(rows.positions[row]) - rows.prompt_lens[row] < params.min_tokens:
                ends = () if params.ignore_eos else self._eos_token_ids
                forbidden.append((row, params.stop_token_ids + ends))
        return forbidden


class LogprobTable:
    """Log-probabilities of the rows that requested them, while they are copied from the device.

    They are those of the model, before penalties and temperature.
    """

    def __init__(self, logits: Tensor, chosen: Tensor, counts: Sequence[int | None]) -> None:
        """`counts` is the number of alternatives for each row; None means not requested."""
        self._num_rows = len(counts)
        asked = [(row, count) for row, count in enumerate(counts) if count is not None]
        self._wanted: list[tuple[int, int]] = asked
        self._found: list[Tensor] = []
        if not asked:
            return
        at = put(np.array([row for row, _ in asked]), logits.device)
        # A row without a finite logit has no probabilities: all of them are reported as zero.
        values = _finite_only(logits.index_select(0, at).float()).log_softmax(-1)
        values = values.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        picked = values.gather(1, chosen.index_select(0, at)[:, None].long())
        ranks = (values > picked).sum(-1)
        top = values.topk(min(max(n for _, n in asked), logits.shape[1]), dim=-1)
        self._found = [fetch(part) for part in (picked[:, 0], ranks, top.values, top.indices)]

    def read(self) -> list[TokenLogprobs | None]:
        """The log-probabilities of each row; None for a row that did not request them. The
        device must have finished the step."""
        found: list[TokenLogprobs | None] = [None] * self._num_rows
        if not self._wanted:
            return found
        picked, ranks, values, ids = (part.tolist() for part in self._found)
        for i, (row, count) in enumerate(self._wanted):
            found[row] = TokenLogprobs(
                chosen=picked[i],
                rank=ranks[i] + 1,
                top_ids=tuple(ids[i][:count]),
                top_values=tuple(values[i][:count]),
            )
        return found


def is_plain(params: Sequence[SamplingParams]) -> bool:
    """Whether all rows are greedy without further parameters."""
    return all(
        p.is_greedy
        and p.logprobs is None
        and p.min_tokens == 0
        and not p.logit_bias
        and not p.grammar
        and not is_penalised(p)
        for p in params
    )


def _greedy(edited: Tensor, logits: Tensor) -> Tensor:
    """The most likely token of each row, whatever its logits contain."""
    if edited.device.type == "cpu":
        best = _argmax(edited)  # for a row with NaN this is the NaN
        if bool(edited.gather(1, best[:, None]).isfinite().all()):
            return best
    usable = _finite_only(edited)
    empty = usable.amax(-1, keepdim=True).isneginf()
    return _argmax(torch.where(empty, _finite_only(logits), usable))


def _argmax(logits: Tensor) -> Tensor:
    """The index of the largest logit. On a CPU numpy is several times faster, but it does not
    support bfloat16."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _finite_only(logits: Tensor) -> Tensor:
    return torch.where(logits.isfinite(), logits, -torch.inf)


def _draw(
    logits: Tensor, best: Tensor, params: Sequence[SamplingParams], positions: Ints
) -> Tensor:
    """Invert the cumulative distribution at one number per row; `best` if that is not
    possible."""
    temperatures = _column([p.temperature for p in params], logits)
    largest = logits.gather(1, best[:, None])
    probs = ((logits - largest) / temperatures).softmax(-1)
    floor = _floor(probs, params)
    if floor is not None:
        probs = probs.masked_fill(probs < floor, 0.0)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    drawn = uniform([p.seed for p in params], positions)
    at = put(drawn, logits.device)[:, None] * total
    # The product may round up to the total, after which there is no token.
    at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))
    drawn_ids = torch.searchsorted(cumulative, at, right=True)[:, 0]
    return torch.where(total[:, 0].isfinite(), drawn_ids, best)


def _floor(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """Smallest probability that is kept in each row; None keeps everything."""
    floor = None
    if any(p.min_p > 0 for p in params):
        floor = probs.amax(-1, keepdim=True) * _column([p.min_p for p in params], probs)
    cut = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if cut:
        if floor is None:
            floor = torch.zeros_like(probs[:, :1])
        at = put(np.array(cut), probs.device)
        least = _cut(probs.index_select(0, at), [params[row] for row in cut])
        floor.index_copy_(0, at, torch.maximum(floor.index_select(0, at), least))
    return floor


def _cut(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probability of the last token within top-k and, of those, top-p."""
    vocab = probs.shape[1]
    limits = [min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params]
    ordered = probs.topk(max(limits), dim=-1).values
    limit = put(np.array(limits), probs.device)[:, None]
    within = torch.arange(ordered.shape[1], device=probs.device) < limit
    kept = torch.where(within, ordered, 0.0)
    cumulative = kept.cumsum(-1)
    mass = cumulative[:, -1:] * _column([p.top_p for p in params], probs)
    within &= cumulative - kept < mass
    last = within.sum(-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, last)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return put(np.array(values, dtype=np.float32), like.device)[:, None]
