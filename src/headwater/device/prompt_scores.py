"""Log-probabilities of prompt tokens, computed in the same step as the prompt."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from headwater.device.sampler import LogprobTable
from headwater.device.upload import put
from headwater.scheduler.batch import ScheduledBatch
from headwater.scheduler.request import TokenLogprobs

_SLICE = 256
"""Positions whose logits exist at the same time."""

LogitsOf = Callable[[int, int], Tensor]
"""Returns the logits of a range of the batch's scored places."""


class PromptScores:
    """The scored places of one batch, while they are copied from the device."""

    def __init__(self, batch: ScheduledBatch, logits_of: LogitsOf) -> None:
        self._batch = batch
        targets = np.concatenate([targets for targets, _ in batch.scored.values()])
        counts = [n for targets, n in batch.scored.values() for _ in range(len(targets))]
        self._tables = []
        for start in range(0, len(targets), _SLICE):
            end = min(start + _SLICE, len(targets))
            logits = logits_of(start, end)
            chosen = put(targets[start:end].astype(np.int64), logits.device)
            self._tables.append(LogprobTable(logits, chosen, counts[start:end]))

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """The scores by row of the batch. The device must have finished the step."""
        found = [entry for table in self._tables for entry in table.read() if entry is not None]
        scores: dict[int, list[TokenLogprobs]] = {}
        for row, (targets, _) in self._batch.scored.items():
            scores[row], found = found[: len(targets)], found[len(targets) :]
        return scores
