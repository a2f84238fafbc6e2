"""Where each sequence is, for whoever watches: progress in tokens, and what it waits for."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from headwater.scheduler.roster import SequenceTable
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.types import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """One sequence between two steps. Says nothing of its tokens but how many there are."""

    request_id: RequestId
    state: str
    """`waiting`, `remote`, `receiving`, `prefill`, `decode` or `leaving`."""

    waits_for: str | None
    """While it waits: `load`, `prefix` (that another is computing) or `room`."""

    age_s: float
    """Since it arrived."""

    prompt_tokens: int
    found_tokens: int
    """Of the prompt, what was found when it was admitted last."""

    computed_tokens: int
    """Of all its tokens, those whose KV is written."""

    output_tokens: int
    max_output_tokens: int
    num_preemptions: int


def view_sequences(
    roster: SequenceTable, *, max_sequences: int, now: float
) -> list[SequenceView]:
    """Running ones first, then those that wait, in their order; at most `max_sequences`."""
    everyone: Iterator[Sequence] = chain(roster.running(), roster.remote, roster.waiting)
    return [_view(sequence, now) for sequence in islice(everyone, max_sequences)]


def _view(sequence: Sequence, now: float) -> SequenceView:
    return SequenceView(
        request_id=sequence.request_id,
        state=sequence.state.name.lower(),
        waits_for=_waits_for(sequence),
        age_s=max(now - sequence.request.arrival_s, 0.0),
        prompt_tokens=sequence.prompt_tokens,
        found_tokens=min(sequence.num_found, sequence.prompt_tokens),
        computed_tokens=sequence.num_computed,
        output_tokens=sequence.num_output,
        max_output_tokens=sequence.num_tokens_end - sequence.prompt_tokens,
        num_preemptions=sequence.num_preemptions,
    )


def _waits_for(sequence: Sequence) -> str | None:
    if sequence.state is not SequenceState.WAITING:
        return None
    load = sequence.load
    if load is not None and load.until_s is not None and load.ended is None:
        return "load"
    return "room" if sequence.leader is None else "prefix"
