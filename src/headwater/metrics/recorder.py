"""Counts outputs and collects histograms. Independent of Prometheus. Used in one event loop, so
it needs no lock."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from headwater.clock import Clock
from headwater.metrics import names
from headwater.metrics.ledger import RequestRecord
from headwater.metrics.names import Metric
from headwater.scheduler.request import SequenceOutput, Usage

_BY_NAME = {metric.name: metric for metric in names.SERVER_METRICS}


class Histogram:
    """Number of observations in each bucket, and their sum."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)  # the last bucket has everything above
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self.buckets, value)] += times
        self.total += value * times

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add the observations of another histogram with the same buckets."""
        self.counts = [mine + other for mine, other in zip(self.counts, counts, strict=True)]
        self.total += total


class RecorderSnapshot(Struct, frozen=True, kw_only=True):
    """The totals of one recorder, by metric name. It is sent between processes."""

    counts: list[tuple[str, str, int]] = []
    """Each entry has a metric, a label and a count."""

    histograms: dict[str, tuple[list[int], float]] = {}
    """Counts by bucket, and the sum."""


class Recorder:
    """The totals of one HTTP worker since it started, or of several joined."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Metric, str]] = Counter()
        """Counts by metric and label value; the value is empty for a metric without labels."""
        self.histograms = {
            metric: Histogram(metric.buckets)
            for metric in names.SERVER_METRICS
            if metric.buckets
        }

    @classmethod
    def join(cls, snapshots: Iterable[RecorderSnapshot]) -> "Recorder":
        """A recorder with the totals of all `snapshots`."""
        joined = cls()
        for snapshot in snapshots:
            for name, label, amount in snapshot.counts:
                joined.counts[_BY_NAME[name], label] += amount
            for name, (counts, total) in snapshot.histograms.items():
                joined.histograms[_BY_NAME[name]].add(counts, total)
        return joined

    def snapshot(self) -> RecorderSnapshot:
        """The totals now."""
        return RecorderSnapshot(
            counts=[(metric.name, label, n) for (metric, label), n in self.counts.items()],
            histograms={
                metric.name: (list(entry.counts), entry.total)
                for metric, entry in self.histograms.items()
            },
        )

    def count(self, metric: Metric, amount: int = 1, label: str = "") -> None:
        """Add to a counter."""
        self.counts[metric, label] += amount

    def observe(self, metric: Metric, value: float, times: int = 1) -> None:
        """Add to a histogram."""
        self.histograms[metric].observe(value, times)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceProgress:
    """What a timer needs to know about its sequence."""

    request_id: str
    prompt_tokens: int
    unix_s: float
    """The current time, in seconds since 1970."""

    token_bytes: int
    """Bytes of KV of one token."""

    traceparent: str | None = None


_TOKENS = (names.GENERATION_TOKENS, "")
"""Key of the count of generated tokens. Created once, because each output needs it."""


class RequestTimer:
    """Reports the life of one sequence to the recorder, output by output."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self._recorder = recorder
        self._itl = recorder.histograms[names.ITL]
        self._clock = clock
        self._start_s = clock.now()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._num_tokens = 0
        self._usage: Usage | None = None

    def record(self, output: SequenceOutput) -> None:
        """Count one output."""
        recorder, num_tokens = self._recorder, len(output.tokens)
        if output.usage is not None:
            self._usage = output.usage
            self._record_prompt(output.usage)
        if not num_tokens:
            return
        now_s = self._clock.now()
        self._num_tokens += num_tokens
        recorder.counts[_TOKENS] += num_tokens
        if self._last_s is None:
            self._first_s = now_s
            recorder.observe(names.TTFT, now_s - self._start_s)
        else:
            # Several tokens in one output came in several steps; they share the time evenly.
            self._itl.observe((now_s - self._last_s) / num_tokens, num_tokens)
        self._last_s = now_s

    def end(self, finish_reason: str, *, place: SequenceProgress) -> RequestRecord:
        """Count the end, whatever the reason, and return the record of the request."""
        now_s = self._clock.now()
        self._recorder.count(names.SUCCESS, label=finish_reason)
        self._recorder.observe(names.E2E, now_s - self._start_s)
        usage, first_s = self._usage, self._first_s
        found = {} if usage is None else dict(usage.by_tier)
        loaded = sum(count for tier, count in found.items() if tier != "device")
        return RequestRecord(
            request_id=place.request_id,
            start_unix_s=place.unix_s - (now_s - self._start_s),
            duration_s=now_s - self._start_s,
            queued_s=None if usage is None else usage.queued_s,
            first_token_s=None if first_s is None else first_s - self._start_s,
            inter_token_s=self._inter_token_s(),
            prompt_tokens=place.prompt_tokens,
            output_tokens=self._num_tokens,
            cached_tokens=0 if usage is None else usage.cached_tokens,
            tokens_by_source=found if usage is None else found | {"computed": usage.computed},
            miss_reason=None if usage is None else usage.miss_reason,
            loaded_bytes=loaded * place.token_bytes,
            load=None if usage is None else usage.load,
            finish_reason=finish_reason,
            traceparent=place.traceparent,
        )

    def _inter_token_s(self) -> float | None:
        if self._first_s is None or self._last_s is None or self._num_tokens < 2:
            return None
        return (self._last_s - self._first_s) / (self._num_tokens - 1)

    def _record_prompt(self, usage: Usage) -> None:
        recorder = self._recorder
        recorder.count(names.PROMPT_TOKENS, usage.prompt_tokens)
        recorder.observe(names.QUEUE, usage.queued_s)
        recorder.count(names.PROMPT_TOKENS_BY_SOURCE, usage.computed, "computed")
        if usage.computed:
            reason = usage.miss_reason or names.LAST_BLOCK
            recorder.count(names.COMPUTED_TOKENS, usage.computed, reason)
        for tier, num_tokens in usage.by_tier.items():
            recorder.count(names.PROMPT_TOKENS_BY_SOURCE, num_tokens, tier)
