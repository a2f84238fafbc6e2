"""A step that is on the device, and how its result is read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.device.gpu.sampling import PendingLogprobs
from headwater.device.prompt_scores import PromptScores
from headwater.device.runner import void_unmasked
from headwater.device.sampler import LogprobTable
from headwater.engine.masks import StepMasks
from headwater.scheduler.batch import IntArray, ScheduledBatch, StepResult
from headwater.scheduler.output import TokenLogprobs
from headwater.types import Tokens


@dataclass(slots=True, kw_only=True, eq=False)
class SubmittedStep:
    """A step that was submitted."""

    batch: ScheduledBatch
    places: IntArray
    """Per sampled row: where its token is in `host`."""

    host: Tensor
    done: torch.cuda.Event
    logprobs: PendingLogprobs | LogprobTable | None
    masks: StepMasks | None
    """Of the rows with a grammar; None where there are none."""

    scores: PromptScores | None
    """Of the rows whose prompt tokens are wanted with log-probabilities."""

    carried: dict[int, int]
    """By row with a grammar: the token that it continues from."""

    def result(self) -> StepResult:
        """What the step chose; waits for it."""
        tokens = self.tokens()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if self.logprobs is not None:
            logprobs = self.logprobs.read()
        result = StepResult(step=self.batch.step, tokens=tokens, logprobs=logprobs)
        void_unmasked(result, self.batch, self.carried, self.masks)
        if self.scores is not None:
            result.scores = self.scores.read()
        return result

    def tokens(self) -> Tokens:
        """What was chosen, per sampled row; waits for the step."""
        self.done.synchronize()
        tokens: Tokens = self.host.numpy()[self.places].copy()
        return tokens
