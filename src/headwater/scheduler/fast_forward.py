"""Applies several decode-only steps at once, for simulators.

Between two decisions the engine loop repeats itself: the same sequences decode, and none arrives,
ends, needs a block or fills one. A simulator computes nothing, so it need not run the loop for
each of these steps. The result is exactly that of running them one by one: the state after k
steps in which nothing is decided is a function of the k sampled tokens per row.
"""

from collections.abc import Sequence as Listed
from math import inf
from typing import NamedTuple

from headwater.scheduler.admission import Admission
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.sequence import Sequence
from headwater.types import Tokens


class DecodeOnly(NamedTuple):
    """How many of the next steps are known to only decode."""

    num_steps: int
    """Upper bound of the steps that may be applied at once."""

    until_s: float = inf
    """Only steps that begin before this time: at this time a waiting sequence may time out."""

    decoding: Listed[Sequence] = ()
    """The rows of each of these steps."""


def decode_only_steps(
    table: SequenceTable, admission: Admission, config: SchedulerConfig
) -> DecodeOnly:
    """The steps that decide nothing. No step may be in flight and no output pending."""
    decoding = table.decoding
    if not decoding or table.prefilling or table.preempting:
        return DecodeOnly(0)
    until_s = inf
    if admission.has_candidates and table.num_running < config.max_num_seqs:
        # Every step examines the waiting sequences. This changes nothing only while the inputs
        # are those of the last step that examined them and admitted none.
        if not admission.is_futile:
            return DecodeOnly(0)
        until_s = admission.recheck_s
    singles = [sequence for sequence in decoding if not sequence.has_row]
    num_steps = _num_steps(singles)
    if table.rows.sequences:
        num_steps = min(num_steps, table.rows.num_quiet_steps())
    return DecodeOnly(num_steps, until_s, decoding)


def fast_forward(decoding: Listed[Sequence], tokens: Tokens) -> None:
    """Give each of `decoding` its column of `tokens`; `tokens` has one row per step."""
    for row, sequence in enumerate(decoding):
        sequence.fast_forward(tokens[:, row], row)


def _num_steps(decoding: Listed[Sequence]) -> int:
    """Steps before one of them needs a block, has one to commit, or gets its last token.

    The step that fills a block or reaches the length decides something, hence the `- 1`. A
    sequence with stop tokens may end in any step.
    """
    num_steps = 1 << 30
    for sequence in decoding:
        if sequence.stop_tokens:
            return 0
        left = min(
            # No `- 1` here: the step that uses the last place of a block takes no new one yet.
            sequence.schedulable_end - sequence.num_scheduled,
            sequence.commit_at - sequence.num_computed - 1,
            sequence.num_tokens_end - sequence.num_tokens - 1,
        )
        if left <= 0:
            return 0
        num_steps = min(num_steps, left)
    return num_steps
