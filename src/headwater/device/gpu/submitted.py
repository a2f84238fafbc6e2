"""A step on the device, and how its result is read."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headwater.device.gpu.sampling import PendingLogprobs
from headwater.device.penalties import History, is_penalised
from headwater.device.prompt_scores import PromptScores
from headwater.device.runner import void_unmasked
from headwater.device.sampler import LogprobTable, SampledRows
from headwater.engine.masks import StepMasks
from headwater.scheduler.batch import IntArray, ScheduledBatch, StepResult
from headwater.scheduler.request import TokenLogprobs
from headwater.types import Tokens


def record_begin() -> torch.cuda.Event:
    """An event that is recorded when the device begins what is queued next."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(slots=True, kw_only=True, eq=False)
class SubmittedStep:
    """A step that was submitted."""

    batch: ScheduledBatch
    places: IntArray
    """Per sampled row: index of its token in `host`."""

    host: Tensor
    logprobs: PendingLogprobs | LogprobTable | None
    masks: StepMasks | None
    """Masks of the rows with a grammar; None if there are none."""

    scores: PromptScores | None
    """Scores of rows whose prompt tokens are reported with log-probabilities."""

    carried: dict[int, int]
    """The token before the sampled one, for each row with a grammar."""

    began: torch.cuda.Event | None = None
    """When the device began the step; None if its time is not measured."""

    # not `blocking`: a sleeping thread woke up to 5 ms late
    done: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(enable_timing=True))

    found: StepResult | None = None
    """The result, if it was read before."""

    def result(self) -> StepResult:
        """The result of the step; waits for it. Every call returns the same object."""
        if self.found is None:
            self.found = self._read()
        return self.found

    def _read(self) -> StepResult:
        tokens = self.tokens()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if self.logprobs is not None:
            logprobs = self.logprobs.read()
        result = StepResult(step=self.batch.step, tokens=tokens, logprobs=logprobs)
        void_unmasked(result, self.batch, self.carried, self.masks)
        if self.scores is not None:
            result.scores = self.scores.read()
        if self.began is not None:
            result.seconds = self.began.elapsed_time(self.done) / 1e3
        return result

    def tokens(self) -> Tokens:
        """The token of each sampled row; waits for the step."""
        self.done.synchronize()
        tokens: Tokens = self.host.numpy()[self.places].copy()
        return tokens


def carried_tokens(batch: ScheduledBatch, last: SubmittedStep | None) -> dict[int, int]:
    """The token before the sampled one, for each row with a grammar, when `last`, the previous
    step, has sampled it. The device computes this step meanwhile."""
    wanted = [
        row
        for row, params in zip(batch.sampled.tolist(), batch.params, strict=True)
        if params.grammar and batch.carry[row] >= 0
    ]
    if not wanted or last is None:
        return {}
    rows = last.batch.sampled.tolist()
    tokens = dict(zip(rows, last.result().tokens.tolist(), strict=True))
    return {row: tokens[int(batch.carry[row])] for row in wanted}


def sampled_rows(
    batch: ScheduledBatch, masks: StepMasks | None, last_token: Callable[[int], Tokens]
) -> SampledRows:
    """The rows of `batch` that are sampled; `last_token` returns the token that the previous
    step sampled for a row, and waits for it."""
    return SampledRows(
        params=batch.params,
        positions=batch.context_lens[batch.sampled].astype(np.int64),
        prompt_lens=batch.prompt_lens,
        histories=_histories(batch, last_token),
        masks=masks,
    )


def _histories(
    batch: ScheduledBatch, last_token: Callable[[int], Tokens]
) -> dict[int, History]:
    """Histories of penalised rows, which need every token: such steps wait for the previous
    one."""
    histories: dict[int, History] = {}
    for i, params in enumerate(batch.params):
        if not is_penalised(params):
            continue
        tokens, prompt_len = batch.histories[i]
        source = int(batch.carry[batch.sampled[i]])
        if source >= 0:
            tokens = np.append(tokens, last_token(source))
        histories[i] = tokens, prompt_len
    return histories
