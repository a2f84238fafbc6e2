"""The whole input of one forward pass, and what comes back from it.

Both are values in arrays: one entry a sequence or a token, never an object a token.

    rows         |  decode  |   chunk of a prompt   | decode |     one row a sequence
    tokens       |    t     |  t  t  t  t  t  t  t  |   t    |     packed, no padding
    query_start  0          1                       8        9
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwater.scheduler.sequence import SamplingParams
from headwater.types import RequestId, Slots, Tokens

IntArray = NDArray[np.int32]


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledBatch:
    """What one step computes. Built by the scheduler, read by the runner, changed by neither."""

    step: int
    """Number of this step, counting up from 0 without gaps over the submitted batches."""

    request_ids: list[RequestId]
    """Which sequence each row is."""

    tokens: Tokens
    """Input token ids of all rows, packed. Undefined for a row with a `carry`."""

    positions: IntArray
    """Position of each token of `tokens` in its sequence."""

    query_start: IntArray
    """Row r owns tokens[query_start[r]:query_start[r + 1]]; one longer than the rows."""

    context_lens: IntArray
    """Per row: tokens with KV once this step is done, this step's own included."""

    block_tables: list[Slots]
    """Per row: device slots in position order, covering at least `context_lens` tokens."""

    sampled: IntArray
    """Rows that choose a token after this step: decodes, and last chunks of prompts."""

    params: list[SamplingParams]
    """Per *sampled* row."""

    histories: list[tuple[Tokens, int]] = field(default_factory=list)
    """Per *sampled* row: all tokens known so far, and how many of them are the prompt.
    Read for penalties, min_tokens, and the position that seeds randomness."""

    carry: IntArray
    """Per row: the row of the *previous* batch whose sampled token is this row's only input
    token, or -1 when `tokens` has it. Used when two steps are in flight."""

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)


@dataclass(slots=True, kw_only=True, eq=False)
class StepResult:
    """What one step chose. Entries follow `ScheduledBatch.sampled`."""

    step: int
    tokens: Tokens
    logprobs: list["TokenLogprobs | None"]
    """Per sampled row; None where none were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities, before temperature and penalties."""

    chosen: float
    rank: int
    """1 is the most likely token."""

    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]
