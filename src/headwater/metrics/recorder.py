"""Outputs in, counts and histograms out. Knows nothing of Prometheus.

Belongs to one event loop, so it needs no lock.
"""

from bisect import bisect_left
from collections import Counter

from headwater.clock import Clock
from headwater.metrics import names
from headwater.metrics.names import Metric
from headwater.scheduler.output import SequenceOutput
from headwater.scheduler.usage import Usage


class Histogram:
    """How many observations fell into each bucket, and their sum."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)  # the last is everything above
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self.buckets, value)] += times
        self.total += value * times


class Recorder:
    """The totals of one server since it started."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Metric, str]] = Counter()
        """By metric and the value of its label, empty where it has none."""
        self.histograms = {
            metric: Histogram(metric.buckets)
            for metric in names.SERVER_METRICS
            if metric.buckets
        }

    def count(self, metric: Metric, amount: int = 1, label: str = "") -> None:
        """Add to a counter."""
        self.counts[metric, label] += amount

    def observe(self, metric: Metric, value: float, times: int = 1) -> None:
        """Add to a histogram."""
        self.histograms[metric].observe(value, times)


class RequestTimer:
    """Reports one sequence's life to the recorder, as its outputs arrive."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self._recorder = recorder
        self._clock = clock
        self._start_s = clock.now()
        self._last_s: float | None = None

    def land(self, output: SequenceOutput) -> None:
        """Count one output."""
        recorder, num_tokens = self._recorder, len(output.tokens)
        if output.usage is not None:
            self._record_prompt(output.usage)
        if not num_tokens:
            return
        now_s = self._clock.now()
        recorder.count(names.GENERATION_TOKENS, num_tokens)
        if self._last_s is None:
            recorder.observe(names.TTFT, now_s - self._start_s)
        else:
            # Several tokens in one output came in several steps; they share the time evenly.
            recorder.observe(names.ITL, (now_s - self._last_s) / num_tokens, num_tokens)
        self._last_s = now_s

    def end(self, finish_reason: str) -> None:
        """Count the end, whatever it was."""
        self._recorder.count(names.SUCCESS, label=finish_reason)
        self._recorder.observe(names.E2E, self._clock.now() - self._start_s)

    def _record_prompt(self, usage: Usage) -> None:
        recorder = self._recorder
        recorder.count(names.PROMPT_TOKENS, usage.prompt_tokens)
        recorder.observe(names.QUEUE, usage.queued_s)
        recorder.count(names.PROMPT_TOKENS_BY_SOURCE, usage.computed, "computed")
        for tier, num_tokens in usage.by_tier.items():
            recorder.count(names.PROMPT_TOKENS_BY_SOURCE, num_tokens, tier)
