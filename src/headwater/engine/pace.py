"""Measures recent speeds: `MeasuredRates` for pricing loads, and `StepCosts` for choosing the
prompt tokens of a step."""

from collections import deque
from typing import NamedTuple

import numpy as np

from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.load_state import MeasuredRates
from headwater.scheduler.pacing import CONTEXT_TOKENS, PredictionLog, StepCosts
from headwater.transfer.mover import Mover

_MEMORY = 0.9
"""Factor by which the weight of a step decays with each later step."""

_PREFILL_SHARE = 4
"""A step with at least this many tokens per row measures how fast prompts are computed."""


_COST_MEMORY = 0.8
"""Factor by which the weight of a step's cost decays with each later step of its kind."""

_SLOWER_MEMORY = 0.97
"""The same factor for a decode step that took longer than expected. A step is measured when it
is collected, and the host collects late when it launches the kernels of another step. Such
delays only add time, so the estimate follows slow steps slowly."""

_MAX_CHANGE = 4.0
"""A step that took longer than this many times its estimate counts as this many times: one very
slow step must not stop prompts."""

_LARGE_CHUNK = 1024
"""Prompt cost above which the launch time of a step without decodes can be neglected."""

_LEAST_CHUNK_SHARE = 0.25
"""Smallest share of a mixed step that is attributed to its prompt tokens."""


class _StepShape(NamedTuple):
    """What determines how long a step takes."""

    num_tokens: int
    num_rows: int
    num_decodes: int
    chunk_cost: float
    """Cost of its prompt tokens, in prompt tokens without context."""

    is_delayed: bool
    """Whether it waits for a load, so that its time says nothing about computing."""


class StepCostEstimator:
    """Measures the cost of decode steps and of prompt tokens.

    Decode steps are kept by number of rows, in powers of two. The cost of one more prompt token
    is measured with steps without decodes, which are large. The rest of the time of a mixed
    step is overhead: decodes, launches, and the error in the cost of a token. So the next
    budget is right even if the cost of a token is wrong.
    """

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}
        """Seconds of a decode step, by the bit length of its number of rows."""
        self._rows: dict[int, int] = {}
        """The number of rows of the last measurement, by the same bit length."""
        self._prompt_token_s = self._mixed_token_s = self._overhead_s = 0.0
        self.costs = StepCosts()

    def note_decode(self, num_rows: int, seconds: float) -> None:
        """Learn from a step that decoded this many rows and computed no prompt."""
        size = num_rows.bit_length()
        known = self._decode_s.get(size, 0.0)
        memory = _SLOWER_MEMORY if seconds > known else _COST_MEMORY
        self._decode_s[size] = _smoothed(known, seconds, memory)
        self._rows[size] = num_rows
        self._publish(num_rows)

    def note_chunks(self, num_decodes: int, chunk_cost: float, seconds: float) -> None:
        """Learn from a step that computed prompt tokens of this cost together with this many
        decodes."""
        if not num_decodes:
            if chunk_cost >= _LARGE_CHUNK:
                self._prompt_token_s = _smoothed(self._prompt_token_s, seconds / chunk_cost)
        else:
            decode_s = self._expected_decode_s(num_decodes)
            spent_s = max(seconds - decode_s, _LEAST_CHUNK_SHARE * seconds)
            self._mixed_token_s = _smoothed(self._mixed_token_s, spent_s / chunk_cost)
            overhead_s = seconds - self._token_s * chunk_cost
            self._overhead_s = _smoothed(self._overhead_s, max(overhead_s, 0.0))
        self._publish(num_decodes)

    @property
    def _token_s(self) -> float:
        """Seconds of one more prompt token; 0 means unknown."""
        return self._prompt_token_s or self._mixed_token_s

    def _publish(self, num_rows: int) -> None:
        self.costs = StepCosts(
            decode_s=self._expected_decode_s(num_rows),
            token_s=self._token_s,
            overhead_s=self._overhead_s,
        )

    def _expected_decode_s(self, num_rows: int) -> float:
        """Seconds of a decode step: measured with about as many rows, or interpolated between
        measurements with fewer and with more rows, or the nearest measurement; 0 before the
        first decode."""
        size = num_rows.bit_length()
        if size in self._decode_s or not self._decode_s:
            return self._decode_s.get(size, 0.0)
        sizes = sorted(self._decode_s)
        rows = [self._rows[known] for known in sizes]
        return float(np.interp(num_rows, rows, [self._decode_s[known] for known in sizes]))


def _smoothed(known: float, seen: float, memory: float = _COST_MEMORY) -> float:
    if not known:
        return seen
    seen = min(seen, _MAX_CHANGE * known)
    return known * memory + seen * (1 - memory)


def _shape(batch: ScheduledBatch) -> _StepShape:
    num_tokens, num_rows = len(batch.tokens), batch.num_rows
    if num_tokens == num_rows:
        return _StepShape(num_tokens, num_rows, num_rows, 0.0, bool(batch.awaits))
    counts = np.diff(batch.query_start).astype(np.int64)
    chunks = counts > 1
    counts, ends = counts[chunks], batch.context_lens[chunks]
    cost = float((counts * (1 + (ends - counts / 2) / CONTEXT_TOKENS)).sum())
    num_decodes = num_rows - len(counts)
    return _StepShape(num_tokens, num_rows, num_decodes, cost, bool(batch.awaits))


class RateEstimator:
    """Measures steps, and asks the mover for the speed of its links."""

    def __init__(self) -> None:
        self.step_costs = StepCostEstimator()
        self._submitted: deque[tuple[_StepShape, float]] = deque()
        self._last_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self.predictions = PredictionLog()
        """Expected and actual seconds of steps that compute prompts."""
        self._known: tuple[tuple[float, int, int, int], MeasuredRates] | None = None
        """The last rates, and the measurements they were computed from."""

    def note(
        self,
        batch: ScheduledBatch | None,
        submitted_s: float,
        result: StepResult | None,
        collected_s: float,
    ) -> None:
        """Measure one turn of the loop, with the batch that was submitted and the result that
        was collected, if any."""
        if batch is not None:
            self._submitted.append((_shape(batch), submitted_s))
        if result is not None:
            self._end_step(collected_s, result.seconds)

    def rates(self, mover: Mover, now: float) -> MeasuredRates:
        """The current rates. They are computed again after a new measurement and once per
        second."""
        source = (self._tokens, mover.num_observed, mover.num_in_flight, int(now))
        if self._known is None or self._known[0] != source:
            self._known = source, self._make_rates(mover, now)
        return self._known[1]

    def _make_rates(self, mover: Mover, now: float) -> MeasuredRates:
        return MeasuredRates(
            prefill_tokens_s=self._tokens / self._seconds if self._seconds > 0 else None,
            host=mover.rate("host_to_device", now=now),
            storage=mover.rate("storage_to_host", now=now),
            offload_blocks_s=mover.fastest_blocks_s("device_to_host"),
        )

    def _end_step(self, now: float, device_s: float) -> None:
        """Learn from the oldest step, which has ended. Time in which it waited for the previous
        step does not count."""
        shape, began_s = self._submitted.popleft()
        seconds = now - max(began_s, self._last_s)
        self._last_s = now
        if not shape.is_delayed:
            # A step may be collected late, because the host was launching another one.
            cost_s = device_s or seconds
            if shape.chunk_cost:
                self.step_costs.note_chunks(shape.num_decodes, shape.chunk_cost, cost_s)
            else:
                self.step_costs.note_decode(shape.num_rows, cost_s)
        if shape.num_tokens >= _PREFILL_SHARE * shape.num_rows:
            if self._tokens and not shape.is_delayed:
                expected_s = shape.num_tokens * self._seconds / self._tokens
                self.predictions.add("prefill", expected_s, seconds)
            self._tokens = self._tokens * _MEMORY + shape.num_tokens
            self._seconds = self._seconds * _MEMORY + seconds
