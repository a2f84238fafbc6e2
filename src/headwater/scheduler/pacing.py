"""The number of prompt tokens that a step computes in addition to decodes, the order of
prompts, and the time that loads take beside the steps.

Every token of a prompt makes the step longer, and all decoding sequences wait for the step.
With a target for the time between tokens, the step takes as many prompt tokens as fit into the
target. The engine measures what steps cost; this module only calculates, so that the simulator
makes the same decisions.

Which prompts come first: the one with the least left to compute, so that short prompts and hits
do not wait for long ones. A prompt ages. Once other prompts have computed twice as many tokens
as it lacks, it is computed before every younger one. A prompt of R tokens is therefore
overtaken by at most 2 R tokens of prompts that arrived after it, in addition to the share of
each step that is reserved for new ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt
from typing import TYPE_CHECKING, NamedTuple

from headwater.errors import ConfigError
from headwater.scheduler.load_state import MeasuredRates
from headwater.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from headwater.scheduler.batch import StepBudget

AGE_FACTOR = 2
"""A prompt is old when, since it arrived, other prompts have computed this many times the
tokens that it lacks."""

NEW_SHARE = 4
"""One part in this many of a step's prompt tokens is for sequences that have not begun yet."""

MAX_UNFINISHED = 4
"""While this many prompts are computed over several steps, further long prompts wait, because
each prompt in progress holds blocks. Shorter prompts pass them. For an old prompt, or one of a
higher priority class, only the prompts that are computed before it count, so a few more may be
in progress at once."""

CONTEXT_TOKENS = 32768
"""Number of preceding tokens that doubles the cost of a token, because attention reads them.
About right for models of 1 to 70 billion weights; measurements correct the rest."""

_MIN_CHUNK = 128
"""Minimum number of prompt tokens of a step, whatever the target is, so that prompts always
make progress."""

_UNKNOWN_CHUNK = 512
"""Prompt tokens of a step while the cost of a token is not measured yet."""

_AIM = 0.95
"""Share of the target for which a step is planned, because steps differ from their
estimates."""

_CHUNK_STEP = 64
"""Budgets are multiples of this: kernels compute tokens in tiles."""

GRAPH_CHUNK_TOKENS = 256
"""Maximum number of tokens of chunks that a GPU computes as decode rows, in a captured graph.
Up to about this many, a matrix product takes as long as reading the weights."""

GRAPH_CHUNK_KEYS = 1 << 16
"""Maximum number of keys that such rows may read. Reading them takes a tenth of the step of a
model with 8 billion weights; a chunk would read each key only once."""

MAX_SHORT_STEPS = 8
"""Maximum number of steps over which waiting short prompts are spread."""

_DELAY_SHARE = 0.1
"""Share of the last load in the expected delay of the next one."""

_LONG_DELAY_S = 0.01
"""The delay of one load counts at most as this time or the time of its transfer, whichever is
longer."""


class StepCosts(NamedTuple):
    """Measured costs of recent steps, in seconds."""

    decode_s: float = 0.0
    """Time of a step without prompts, with about as many rows as the last step; 0 means
    unknown."""

    token_s: float = 0.0
    """Time of one more prompt token without context; 0 means unknown."""

    overhead_s: float = 0.0
    """Time of a step with decodes and prompts, without the time of its prompt tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItlTarget:
    """How long a step with decodes and prompts should take: the time between tokens."""

    min_s: float
    """The target, or its smallest value if it follows the decode steps."""

    decode_steps: float = 0.0
    """The target is at least this many decode steps. Below a few of them, most of a step would
    be spent on reading the weights, and prompts would be slow."""

    prompt_share: float = 0.0
    """Smallest share of the target for prompt tokens, even if a step then takes longer. If the
    host needs the whole target to launch a step, more tokens in it cost nothing."""

    short_share: float = 0.0
    """Short prompts that wait together are spread over a few steps, so that a step takes at
    most this share of a decode step for them and runs in a graph. With 0, or if decode steps
    are longer than the launches of a step, they are computed as early as the target allows."""

    def __post_init__(self) -> None:
        if not 0.0 < self.min_s < inf:
            raise ConfigError(f"the time between tokens must be positive, got {self.min_s} s")
        if self.decode_steps < 0:
            raise ConfigError(f"decode_steps cannot be negative, got {self.decode_steps}")

    def seconds(self, costs: StepCosts) -> float:
        """The target at these costs."""
        return max(self.min_s, self.decode_steps * costs.decode_s)

    def chunk_tokens(self, costs: StepCosts) -> int:
        """Prompt tokens without context that fit into a step beside the decodes."""
        if not costs.token_s:
            return _UNKNOWN_CHUNK
        target_s = self.seconds(costs)
        left_s = _AIM * target_s - max(costs.overhead_s, costs.decode_s)
        num_tokens = int(max(left_s, self.prompt_share * target_s) / costs.token_s)
        return max(num_tokens // _CHUNK_STEP * _CHUNK_STEP, _MIN_CHUNK)

    def short_tokens(self, costs: StepCosts) -> float:
        """Tokens of short prompts in one step; infinite if they are not spread."""
        if not self.short_share:
            return inf
        if not costs.token_s or not costs.decode_s:
            return GRAPH_CHUNK_TOKENS
        num_tokens = int(self.short_share * costs.decode_s / costs.token_s)
        if num_tokens >= 2 * GRAPH_CHUNK_TOKENS:
            return inf  # the device needs longer for a step than its launches take
        return min(max(num_tokens, _CHUNK_STEP), GRAPH_CHUNK_TOKENS)


ADAPTIVE_ITL = ItlTarget(min_s=0.030, decode_steps=4.0, prompt_share=0.6, short_share=0.8)
"""The default target on a GPU."""


def chunk_cost(start: int, num_tokens: int) -> float:
    """Cost of `num_tokens` tokens after `start` others, in tokens without context."""
    return num_tokens * (1 + (start + num_tokens / 2) / CONTEXT_TOKENS)


def affordable_tokens(start: int, cost: float) -> int:
    """The most tokens after `start` others that cost no more than `cost`; at least one."""
    # n (1 + (start + n / 2) / C) = cost, solved for n.
    linear = CONTEXT_TOKENS + start
    return max(int(sqrt(linear * linear + 2 * CONTEXT_TOKENS * cost) - linear), 1)


def is_old(sequence: Sequence, num_lacking: int, prompt_clock: int) -> bool:
    """Whether `sequence`, which lacks this many tokens, is computed before younger ones.
    `prompt_clock` counts the prompt tokens of all steps so far."""
    return prompt_clock - sequence.entered_at >= AGE_FACTOR * num_lacking


def prompt_place(
    sequence: Sequence, num_lacking: int, prompt_clock: int
) -> tuple[int, bool, int]:
    """The place of a prompt that lacks this many tokens: by priority class; within a class first
    the old ones by arrival, then those that lack the fewest tokens."""
    priority, arrival = sequence.rank
    if is_old(sequence, num_lacking, prompt_clock):
        return priority, False, arrival
    return priority, True, AGE_FACTOR * num_lacking + sequence.entered_at


def prefill_place(sequence: Sequence, prompt_clock: int) -> tuple[int, bool, int]:
    """The place of a running prefill: its own, or that of a sequence that waits for its blocks."""
    num_lacking = sequence.num_tokens - sequence.num_scheduled
    place = prompt_place(sequence, num_lacking, prompt_clock)
    return place if sequence.waiter_place is None else min(place, sequence.waiter_place)


def in_prefill_order(sequences: Iterable[Sequence], prompt_clock: int) -> list[Sequence]:
    """Sorted by `prefill_place`: the next one to compute is first."""
    return sorted(sequences, key=lambda sequence: prefill_place(sequence, prompt_clock))


class PredictionTotals(NamedTuple):
    """Sums over all predictions of one kind."""

    num: int = 0
    expected_s: float = 0.0
    actual_s: float = 0.0
    error_s: float = 0.0
    """Sum of the absolute differences."""


class PredictionLog:
    """Compares expected with actual seconds, to show whether pricing is right.

    One sum for each kind: `host_to_device`, `storage_to_host`, `prefill`.
    """

    def __init__(self) -> None:
        self.totals: dict[str, PredictionTotals] = {}

    def add(self, kind: str, expected_s: float, actual_s: float) -> None:
        """Add an operation that was expected to take `expected_s` and took `actual_s`."""
        num, expected, actual, error = self.totals.get(kind, PredictionTotals())
        self.totals[kind] = PredictionTotals(
            num + 1,
            expected + expected_s,
            actual + actual_s,
            error + abs(actual_s - expected_s),
        )


class LoadForecast(NamedTuple):
    """How long a load was expected to take when it was planned."""

    link: str
    began_s: float
    transfer_s: float
    """Seconds of its transfer, and of the step that began with it if that is longer."""

    delay_s: float
    """Seconds beyond that."""


class LoadForecasts:
    """Learns how much longer loads take than their transfers and the steps meanwhile.

    A job waits until its thread begins, and its blocks are attached when the loop runs its next
    turn. On a CPU this may take several times as long as the transfer. The choice between loading
    and computing counts neither the step nor this delay: both delay a prompt that is computed, too.
    """

    def __init__(self, max_step_tokens: int) -> None:
        self.predictions = PredictionLog()
        """Expected and actual seconds of loads."""
        self.costs = StepCosts()
        """Costs of steps that the loop measured recently. The loop sets a new value here."""
        self.step: StepBudget | None = None
        """What the step being scheduled has left. A load that starts with the step is attached
        after it. None between steps."""
        self.num_decodes = 0
        """Sequences that this step decodes."""
        self._delay_s: dict[str, float] = {}
        self._max_step_tokens = max_step_tokens

    def _step_s(self, rates: MeasuredRates) -> float:
        """Expected seconds of the step being scheduled, without what is admitted later."""
        if self.step is None:
            return 0.0
        decode_s = self.costs.decode_s if self.num_decodes else 0.0
        num_tokens = self._max_step_tokens - self.step.num_tokens - self.num_decodes
        speed = rates.prefill_tokens_s
        return decode_s + (num_tokens / speed if speed else 0.0)

    def delay_s(self, link: str) -> float:
        """Seconds of a load on `link` beyond its transfer and the step meanwhile."""
        return self._delay_s.get(link, 0.0)

    def make(
        self, link: str, transfer_s: float, rates: MeasuredRates, now: float
    ) -> LoadForecast:
        """The forecast of a load on `link` that begins `now`, with the step being scheduled."""
        return LoadForecast(link, now, max(transfer_s, self._step_s(rates)), self.delay_s(link))

    def compare(self, forecast: LoadForecast, now: float) -> None:
        """Compare `forecast` with the time of its load, which has ended now."""
        link, began_s, transfer_s, delay_s = forecast
        actual_s = now - began_s
        self.predictions.add(link, transfer_s + delay_s, actual_s)
        # One load that is very late should change what is expected of the next ones little.
        late_s = min(max(actual_s - transfer_s, 0.0), max(transfer_s, _LONG_DELAY_S))
        known_s = self.delay_s(link)
        self._delay_s[link] = known_s + (late_s - known_s) * _DELAY_SHARE
