"""Totals of the scheduler, and a view of each sequence."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from headwater.scheduler.blocks import GrowthEstimate
from headwater.scheduler.load_state import MeasuredRates
from headwater.scheduler.loading import KVLoader
from headwater.scheduler.pacing import PredictionTotals
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.request import LoadUsage, Usage
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.types import RequestId

_RECENT_LOADS = 16
"""Load decisions kept for inspection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Current counts, and totals since the scheduler was created. The reader computes
    ratios."""

    num_running: int
    num_waiting: int
    num_steps_in_flight: int
    is_paused: bool
    num_steps: int
    num_preemptions: int
    num_prefix_waits: int
    """New sequences that waited for a running prefill instead of computing the same blocks."""

    num_admitted: int
    """Requests that were admitted. Each counts once, however often it was preempted."""

    queue_s: float
    """Seconds that these requests waited before admission, in total."""

    prompt_tokens: int
    """Prompt tokens of these requests."""

    found_tokens: Mapping[str, int]
    """Prompt tokens that were not computed, by the tier in which they were found."""

    misses: Mapping[str, int]
    """Requests that found less than they could, by the first reason."""

    load_choices: Mapping[str, int]
    """Decisions between loading and computing, by reason."""

    rates: MeasuredRates
    """The measured rates behind these decisions."""

    predictions: Mapping[str, PredictionTotals]
    """Expected and actual seconds of loads, by link."""

    recent_loads: tuple[LoadUsage, ...]
    """The latest decisions, oldest first, with their prices and results."""

    num_copies: int
    """Transfers and lookups in flight."""

    generated_tokens: int
    finished: Mapping[str, int]
    """Requests that ended, by finish reason."""

    expected_output_tokens: float
    """Mean output length that admission expects."""

    caution: float
    """Factor on the room that admission leaves for growth."""


@dataclass(slots=True)
class Totals:
    """Counts since the scheduler was created."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prefix_waits: int = 0
    scheduled_prompt_tokens: int = 0
    """Prompt tokens that were scheduled, including recomputed ones: the clock by which prompts
    age."""

    generated_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    num_admitted: int = 0
    prompt_tokens: int = 0
    queue_s: float = 0.0
    found_tokens: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    recent_loads: deque[LoadUsage] = field(default_factory=lambda: deque(maxlen=_RECENT_LOADS))

    def count_admission(self, usage: Usage) -> None:
        """Count a request that was admitted for the first time, with this usage of its
        prompt."""
        self.num_admitted += 1
        self.prompt_tokens += usage.prompt_tokens
        self.queue_s += usage.queued_s
        self.found_tokens.update(usage.by_tier)
        if usage.miss_reason is not None:
            self.misses[usage.miss_reason] += 1
        if usage.load is not None and usage.load.choice != "none":
            self.recent_loads.append(usage.load)


def snapshot(
    totals: Totals,
    table: SequenceTable,
    loader: KVLoader,
    growth: GrowthEstimate,
    *,
    is_paused: bool,
    num_steps_in_flight: int,
    num_copies: int,
) -> SchedulerStats:
    """The current counts of every part. O(1)."""
    return SchedulerStats(
        num_running=table.num_running,
        num_waiting=len(table.waiting),
        num_steps_in_flight=num_steps_in_flight,
        is_paused=is_paused,
        num_steps=totals.num_steps,
        num_preemptions=totals.num_preemptions,
        num_prefix_waits=totals.num_prefix_waits,
        num_admitted=totals.num_admitted,
        queue_s=totals.queue_s,
        prompt_tokens=totals.prompt_tokens,
        found_tokens=dict(totals.found_tokens),
        misses=dict(totals.misses),
        load_choices=dict(loader.choices),
        rates=loader.rates,
        predictions=dict(loader.forecasts.predictions.totals),
        recent_loads=tuple(totals.recent_loads),
        num_copies=num_copies,
        generated_tokens=totals.generated_tokens,
        finished=dict(totals.finished),
        expected_output_tokens=growth.mean_tokens,
        caution=growth.caution,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """One sequence between two steps. It has the number of its tokens, never their content."""

    request_id: RequestId
    state: str
    """The name of its `SequenceState` in lower case, such as `waiting` or `decode`."""

    waits_for: str | None
    """While it waits: `load`, `prefix` (another sequence computes it) or `room`."""

    age_s: float
    """Seconds since it arrived."""

    prompt_tokens: int
    found_tokens: int
    """Prompt tokens that were cached when it was last admitted."""

    computed_tokens: int
    """Tokens whose KV is written."""

    output_tokens: int
    max_output_tokens: int
    num_preemptions: int


def view_sequences(
    table: SequenceTable, *, max_sequences: int, now: float
) -> list[SequenceView]:
    """Running sequences first, then waiting ones, each in order; at most `max_sequences`."""
    sequences: Iterator[Sequence] = chain(table.running(), table.remote, table.waiting)
    return [_view(sequence, now) for sequence in islice(sequences, max_sequences)]


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
    return "room" if sequence.prefix_source is None else "prefix"
