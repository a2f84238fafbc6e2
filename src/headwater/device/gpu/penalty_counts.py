"""Which tokens each penalised sequence contains, counted on the device.

The sampling kernel adds each token that it samples, so everything that a step needs from the
previous step is in device memory. The host fills the counts of a sequence when it is first
penalised, and again whenever a step was skipped: a preempted sequence may return with other
tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from headwater.device.kernels.logit_edits import MAX_COUNT, PROMPT_BIT, make_counts
from headwater.device.upload import put
from headwater.types import RequestId, Tokens


@dataclass(slots=True)
class _Counted:
    """A sequence whose tokens are counted in row `state`, including those of step `step`."""

    state: int
    step: int = -1
    num_tokens: int = 0
    num_prompt: int = 0


class PenaltyCounts:
    """Rows of counts, one for each penalised sequence; the row unused for longest is reused
    first."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self.data = make_counts(max_rows, vocab, device)
        self._free = list(range(max_rows))
        self._by_request: dict[RequestId, _Counted] = {}

    def follows(
        self, request_id: RequestId, *, step: int, num_tokens: int, num_prompt: int
    ) -> bool:
        """Whether the counts are those of this sequence just before this step samples."""
        known = self._by_request.get(request_id)
        return (
            known is not None
            and known.step == step - 1
            and known.num_tokens == num_tokens
            and known.num_prompt == num_prompt
        )

    def advance(self, request_id: RequestId, *, step: int) -> int:
        """The row of a sequence for which `follows` is true; this step adds one token to it."""
        known = self._by_request[request_id]
        known.step = step
        known.num_tokens += 1
        return known.state

    def fill(self, request_id: RequestId, tokens: Tokens, num_prompt: int, *, step: int) -> int:
        """Count all tokens of a sequence again and return its row; this step adds one token to
        it."""
        known = self._by_request.pop(request_id, None) or _Counted(self._take(step))
        known.step, known.num_tokens, known.num_prompt = step, len(tokens) + 1, num_prompt
        self._by_request[request_id] = known
        ids, amounts = _counted(tokens, num_prompt)
        row = self.data[known.state]
        row.zero_()
        row[put(ids, row.device)] = put(amounts, row.device)
        return known.state

    def _take(self, step: int) -> int:
        if self._free:
            return self._free.pop()
        oldest = min(self._by_request, key=lambda name: self._by_request[name].step)
        assert self._by_request[oldest].step < step, "more penalised rows than a step has rows"
        return self._by_request.pop(oldest).state


def _counted(
    tokens: Tokens, num_prompt: int
) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int16]]
]:
    """Distinct ids, and the count of each in the format of the kernels."""
    ids, where = np.unique(tokens, return_inverse=True)
    amounts = np.bincount(where[num_prompt:], minlength=len(ids)).clip(max=MAX_COUNT)
    amounts[where[:num_prompt]] |= PROMPT_BIT
    return ids.astype(np.int64), amounts.astype(np.int16)
