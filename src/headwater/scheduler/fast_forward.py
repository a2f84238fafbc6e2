"""Steps in which nothing is decided, taken in all at once.

Between two decisions the loop repeats itself: the same sequences decode, nobody comes, ends,
needs a block or fills one. Whoever computes nothing, as a simulator does, need not turn the
loop for each of those steps. What comes out is what turning it would have brought.
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
    """How far ahead it is known that steps only decode."""

    num_steps: int
    """At most so many."""

    until_s: float = inf
    """Only steps that begin before this."""

    decoding: Listed[Sequence] = ()
    """Whose rows they have."""


def decode_only_steps(
    table: SequenceTable, admission: Admission, config: SchedulerConfig
) -> DecodeOnly:
    """What is certain when no step is in flight and nothing waits to be handed out."""
    decoding = table.decoding
    if not decoding or table.prefilling or table.preempting:
        return DecodeOnly(0)
    until_s = inf
    if admission.has_candidates and table.num_running < config.max_num_seqs:
        if not admission.is_futile:
            return DecodeOnly(0)
        until_s = admission.recheck_s
    return DecodeOnly(_num_steps(decoding), until_s, decoding)


def fast_forward(decoding: Listed[Sequence], tokens: Tokens) -> None:
    """Give each of `decoding` its column of `tokens`, one row a step."""
    for row, sequence in enumerate(decoding):
        sequence.fast_forward(tokens[:, row], row)


def _num_steps(decoding: Listed[Sequence]) -> int:
    """Steps before one of them needs a block, has one to commit, or has its last token."""
    num_steps = 1 << 30
    for sequence in decoding:
        if sequence.stop_tokens:
            return 0
        left = min(
            sequence.schedulable_end - sequence.num_scheduled,
            sequence.commit_at - sequence.num_computed - 1,
            sequence.num_tokens_end - sequence.num_tokens - 1,
        )
        if left <= 0:
            return 0
        num_steps = min(num_steps, left)
    return num_steps
