"""How long loads were expected to take, how long they took, and what is learned from the
difference."""

from typing import NamedTuple

from headwater.scheduler.batch import StepBudget
from headwater.scheduler.load_state import MeasuredRates
from headwater.scheduler.pacing import StepCosts

_DELAY_SHARE = 0.1
"""Share of the last load in the expected delay of the next one."""

_LONG_DELAY_S = 0.01
"""A load that was later than this, and than twice the expected time, counts as less late."""


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
        self._delay_s: dict[str, float] = {}
        self._max_step_tokens = max_step_tokens
        self._step: StepBudget | None = None
        self._num_decodes = 0

    def begin_step(self, step: StepBudget, num_decodes: int) -> None:
        """Count the step being scheduled, which decodes this many sequences, in forecasts from now on;
        `step` is what it has left."""
        self._step, self._num_decodes = step, num_decodes

    def end_step(self) -> None:
        """Count no step in forecasts from now on: it is scheduled."""
        self._step = None

    def _step_s(self, rates: MeasuredRates) -> float:
        """Expected seconds of the step being scheduled, without what is admitted later. A load that
        starts with it is attached after it."""
        if self._step is None:
            return 0.0
        decode_s = self.costs.decode_s if self._num_decodes else 0.0
        num_tokens = self._max_step_tokens - self._step.num_tokens - self._num_decodes
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
