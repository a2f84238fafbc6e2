"""What the scheduler has and did, in one snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass

from headwater.scheduler.price import Rates
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

    rates: Rates
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
