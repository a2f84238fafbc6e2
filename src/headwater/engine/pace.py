"""How fast things went lately, as the `MeasuredRates` that prices are made from."""

from collections import deque

from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.load_state import MeasuredRates
from headwater.transfer.mover import Mover

_MEMORY = 0.9
"""Weight that a step keeps with each later one."""

_PREFILL_SHARE = 4
"""A step says how fast prompts are computed when it has this many tokens a row."""


class RateEstimator:
    """Measures steps; asks the mover for the speed of its links."""

    def __init__(self) -> None:
        self._submitted: deque[tuple[int, int, float]] = deque()
        self._last_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._known: tuple[tuple[float, int, int], MeasuredRates] | None = None
        """The last rates, and what they were made from."""

    def note(
        self,
        batch: ScheduledBatch | None,
        submitted_s: float,
        result: StepResult | None,
        collected_s: float,
    ) -> None:
        """One turn of the loop: what was submitted, and what was collected, if anything."""
        if batch is not None:
            self._submitted.append((len(batch.tokens), batch.num_rows, submitted_s))
        if result is not None:
            self._end_step(collected_s)

    def rates(self, mover: Mover, now: float) -> MeasuredRates:
        """What is known by now. Made again when something was measured, and each second."""
        source = (self._tokens, mover.num_observed, int(now))
        if self._known is None or self._known[0] != source:
            self._known = source, self._make_rates(mover, now)
        return self._known[1]

    def _make_rates(self, mover: Mover, now: float) -> MeasuredRates:
        return MeasuredRates(
            prefill_tokens_s=self._tokens / self._seconds if self._seconds > 0 else None,
            host=mover.rate("host_to_device", now=now),
            storage=mover.rate("storage_to_host", now=now),
        )

    def _end_step(self, now: float) -> None:
        """The oldest step is done. What it waited for the one before is not its own time."""
        num_tokens, num_rows, began_s = self._submitted.popleft()
        seconds = now - max(began_s, self._last_s)
        self._last_s = now
        if num_tokens >= _PREFILL_SHARE * num_rows:
            self._tokens = self._tokens * _MEMORY + num_tokens
            self._seconds = self._seconds * _MEMORY + seconds
