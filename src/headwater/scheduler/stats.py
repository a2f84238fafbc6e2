"""What the scheduler has and did, in one snapshot."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.scheduler.growth import GrowthEstimate
from headwater.scheduler.intake import Admission
from headwater.scheduler.loading import KVLoader
from headwater.scheduler.price import MeasuredRates
from headwater.scheduler.roster import SequenceTable
from headwater.scheduler.usage import LoadUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts now, and totals since the scheduler was made. Ratios are the reader's."""

    num_running: int
    num_waiting: int
    num_steps_in_flight: int
    is_paused: bool
    num_steps: int
    num_preemptions: int
    num_follows: int
    """Newcomers that waited for a running prefill instead of computing the same blocks."""

    num_admitted: int
    """Requests that were admitted; once each, however often they were preempted."""

    queue_s: float
    """Seconds they had waited by then, summed."""

    prompt_tokens: int
    """Their prompts' tokens."""

    found_tokens: Mapping[str, int]
    """Of those, what was not computed, by the tier it was found in."""

    misses: Mapping[str, int]
    """Requests that found less than they could, by the first reason."""

    load_choices: Mapping[str, int]
    """Load or recompute: how often each was chosen, by reason."""

    rates: MeasuredRates
    """What those choices are priced from, as measured lately."""

    recent_loads: tuple[LoadUsage, ...]
    """The last choices, oldest first, with their prices and what came of them."""

    num_copies: int
    """Transfers and lookups in flight."""

    generated_tokens: int
    finished: Mapping[str, int]
    """Requests that ended, by finish reason."""

    expected_output_tokens: float
    """Mean length that admission reckons with."""

    caution: float
    """Factor on the room admission leaves for growth."""


@dataclass(slots=True)
class Totals:
    """What the scheduler itself counts."""

    num_steps: int = 0
    num_preemptions: int = 0
    generated_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)


def snapshot(
    totals: Totals,
    roster: SequenceTable,
    intake: Admission,
    loads: KVLoader,
    growth: GrowthEstimate,
    *,
    num_steps_in_flight: int,
    num_copies: int,
) -> SchedulerStats:
    """Every owner's counts as they are now. O(1)."""
    return SchedulerStats(
        num_running=roster.num_running,
        num_waiting=len(roster.waiting),
        num_steps_in_flight=num_steps_in_flight,
        is_paused=intake.is_paused,
        num_steps=totals.num_steps,
        num_preemptions=totals.num_preemptions,
        num_follows=intake.num_follows,
        num_admitted=intake.num_admitted,
        queue_s=intake.queue_s,
        prompt_tokens=intake.prompt_tokens,
        found_tokens=dict(intake.found_tokens),
        misses=dict(intake.misses),
        load_choices=dict(loads.choices),
        rates=loads.rates,
        recent_loads=tuple(intake.recent_loads),
        num_copies=num_copies,
        generated_tokens=totals.generated_tokens,
        finished=dict(totals.finished),
        expected_output_tokens=growth.mean_tokens,
        caution=growth.caution,
    )
