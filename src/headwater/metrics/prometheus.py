"""The only module that knows Prometheus: turns recorder and engine snapshot into a scrape.

The families are built for each scrape from numbers that other parts keep, so there is no
registry and no state here.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from headwater.metrics import names
from headwater.metrics.names import Kind, Metric
from headwater.metrics.recorder import Histogram, Recorder
from headwater.metrics.stats import EngineStats
from headwater.storage.base import StorageStats

CONTENT_TYPE: str = CONTENT_TYPE_PLAIN_0_0_4
"""Always plain text: in OpenMetrics, the library replaces the colon of our prefix by an
underscore, and queries would not find the metrics."""

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Values = Mapping[tuple[str, ...], float]
"""Numbers by the values of a metric's labels."""


def render(
    recorder: Recorder,
    stats: EngineStats | None,
    *,
    block_tokens: int,
    num_violations: int = 0,
    num_restarts: int = 0,
    vllm_names: bool = False,
) -> bytes:
    """One scrape. Without `stats` (the engine is dead) it has only the server's own metrics."""
    families = [
        _family(names.ENGINE_UP, {(): float(stats is not None)}),
        _family(names.VIOLATIONS, {(): num_violations}),
        _family(names.ENGINE_RESTARTS, {(): num_restarts}),
    ]
    families += _server_families(recorder)
    if stats is not None:
        values = _engine_values(stats, block_tokens)
        families += [_family(metric, entry) for metric, entry in values.items()]
        if vllm_names:
            families += [
                _family(metric, values[metric], prefix="vllm")
                for metric in names.SCRAPED_BY_ROUTERS
            ]
    return _scrape(families)


def render_values(values: Mapping[Metric, Values]) -> bytes:
    """One scrape of metrics without histograms."""
    return _scrape([_family(metric, entry) for metric, entry in values.items()])


def _scrape(families: list[Family]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    return bytes(generate_latest(registry))


class _Fixed(Collector):
    """A collector of existing families."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _server_families(recorder: Recorder) -> Iterator[Family]:
    for metric in names.SERVER_METRICS:
        if metric.kind is Kind.HISTOGRAM:
            yield _histogram(metric, recorder.histograms[metric])
        else:
            counts = {
                label: n for (other, label), n in recorder.counts.items() if other is metric
            }
            if not metric.labels:
                counts = {"": counts.get("", 0)}
            yield _family(
                metric, {(label,) if metric.labels else (): n for label, n in counts.items()}
            )


def _engine_values(stats: EngineStats, block_tokens: int) -> dict[Metric, Values]:
    device = stats.tiers.get("device")
    host = stats.tiers.get("host")
    blocks: dict[tuple[str, ...], float] = {
        (tier, state): getattr(entry, state)
        for tier, entry in stats.tiers.items()
        for state in ("free", "held", "cached", "evictable")
    }
    if stats.storage is not None and stats.storage.num_blocks is not None:
        blocks["storage", "cached"] = stats.storage.num_blocks
    in_use = device.num_blocks - device.free - device.evictable if device else 0
    shape = (
        str(block_tokens),
        str(device.num_blocks if device else 0),
        str(host.num_blocks if host else 0),
    )
    return {
        names.RUNNING: {(): stats.num_running},
        names.WAITING: {(): stats.num_waiting},
        names.KV_USAGE: {(): in_use / device.num_blocks if device else 0.0},
        names.PREEMPTIONS: {(): stats.num_preemptions},
        names.STEPS: {(): stats.num_steps},
        names.IDLE_TURNS: {(): stats.num_idle_turns},
        names.COMPILATIONS: {(): stats.num_compilations},
        names.STEP_SECONDS: {(): stats.step_s},
        names.DECIDE_SECONDS: {(): stats.decide_s},
        names.QUERIES: {(): stats.query_tokens},
        names.HITS: {(): sum(stats.found_tokens.values())},
        names.MISSES: {(reason,): n for reason, n in stats.misses.items()},
        names.TIER_BLOCKS: blocks,
        names.TIER_EVICTED: {(tier,): entry.evicted for tier, entry in stats.tiers.items()},
        names.DUPLICATES: {(): stats.num_duplicates},
        names.UNWRITTEN: {(): stats.num_unwritten},
        names.LOST_BLOCKS: {
            ("memory",): stats.unstored_blocks,
            ("storage",): stats.lost_blocks - stats.unstored_blocks,
        },
        names.EXPECTED_SECONDS: {(k,): t.expected_s for k, t in stats.predictions.items()},
        names.ACTUAL_SECONDS: {(k,): t.actual_s for k, t in stats.predictions.items()},
        names.ERROR_SECONDS: {(k,): t.error_s for k, t in stats.predictions.items()},
        names.HINTS: {(outcome,): n for outcome, n in stats.hints.items()},
        **_transfer_values(stats),
        **_handoff_values(stats),
        names.CACHE_CONFIG: {shape: 1},
    }


def _handoff_values(stats: EngineStats) -> dict[Metric, Values]:
    sides = stats.handoffs

    def by_reason(field: str) -> Values:
        return {
            (name, reason): n
            for name, side in sides.items()
            for reason, n in getattr(side, field).items()
        }

    decode = sides.get("decode")
    return {
        names.PD_IN_FLIGHT: {(name,): side.in_flight for name, side in sides.items()},
        names.PD_ASKS: {(name,): side.asks for name, side in sides.items()},
        names.PD_HANDOFFS: {(name,): side.done for name, side in sides.items()},
        names.PD_REFUSALS: by_reason("refusals"),
        names.PD_FAILURES: by_reason("failures"),
        names.PD_EXPIRED: {
            (name,): side.failures.get("expired", 0) for name, side in sides.items()
        },
        names.PD_BYTES: {(name,): side.num_bytes for name, side in sides.items()},
        names.PD_SECONDS: {
            (part,): seconds for part, seconds in (decode.seconds if decode else {}).items()
        },
    }


def _transfer_values(stats: EngineStats) -> dict[Metric, Values]:
    links = stats.links
    return {
        names.TRANSFER_BYTES: {(name,): link.num_bytes for name, link in links.items()},
        names.TRANSFER_SECONDS: {(name,): link.busy_s for name, link in links.items()},
        names.TRANSFER_JOBS: {(name,): link.num_jobs for name, link in links.items()},
        names.TRANSFER_FAILURES: {
            (name, reason): n
            for name, link in links.items()
            for reason, n in link.failures.items()
        },
        names.TRANSFER_CEILING: {
            (name,): link.fastest_bytes_s
            for name, link in links.items()
            if link.fastest_bytes_s
        },
        names.TRANSFER_QUEUE: {(name,): link.in_flight for name, link in links.items()},
        names.LOAD_CHOICES: {(reason,): n for reason, n in stats.load_choices.items()},
        **_storage_values(stats.storage),
    }


def _storage_values(storage: StorageStats | None) -> dict[Metric, Values]:
    if storage is None:
        return {
            names.STORAGE_FAULTS: {},
            names.STORAGE_READ_BREAKER: {},
            names.STORAGE_WRITE_BREAKER: {},
            names.STORAGE_RECOVERIES: {},
            names.STORAGE_THREADS_LOST: {},
        }
    return {
        names.STORAGE_FAULTS: {(reason,): n for reason, n in storage.reasons.items()},
        names.STORAGE_READ_BREAKER: {(): _is_open(storage.breaker)},
        names.STORAGE_WRITE_BREAKER: {(): _is_open(storage.write_breaker)},
        names.STORAGE_RECOVERIES: {(): storage.recoveries},
        names.STORAGE_THREADS_LOST: {(): storage.threads_lost},
    }


def _is_open(breaker: str) -> float:
    return float(breaker in ("open", "half_open"))


def _family(metric: Metric, values: Values, *, prefix: str = names.PREFIX) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(f"{prefix}:{metric.name}", metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram(metric: Metric, histogram: Histogram) -> Family:
    family = HistogramMetricFamily(f"{names.PREFIX}:{metric.name}", metric.help)
    bounds = [*(str(bound) for bound in histogram.buckets), "+Inf"]
    family.add_metric(
        [], list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total
    )
    return family
