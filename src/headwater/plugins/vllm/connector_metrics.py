"""Metrics of the connector in vLLM's logs and Prometheus, under Headwater's names."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from headwater.plugins.storage_metrics import METRICS, Sample

_SEPARATOR = "|"
"""Separates a metric's name and its labels: stats are sent as one flat mapping."""


@dataclass
class ConnectorStats(KVConnectorStats):
    """Increments of counters and values of gauges since the last report."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        """Adds up the counters of several reports; for a gauge the newest value counts."""
        for name, value in other.data.items():
            is_counter = name.split(_SEPARATOR)[0] in _COUNTERS
            self.data[name] = self.data.get(name, 0) + value if is_counter else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


_COUNTERS = {metric.name for metric in METRICS if metric.is_counter}


class StatsDelta:
    """Turns totals into increments. Reports nothing if nothing changed."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def take(self, samples: Iterable[Sample]) -> ConnectorStats | None:
        """What changed since the last call."""
        data: dict[str, float] = {}
        for sample in samples:
            name = _SEPARATOR.join((sample.metric.name, *sample.labels))
            before = self._last.get(name)
            if (
                sample.value != before
            ):  # a first 0 is reported too, so that the metric exists from then on
                grown = sample.value - (before or 0.0)
                data[name] = grown if sample.metric.is_counter else sample.value
                self._last[name] = sample.value
        return ConnectorStats(data=data) if data else None


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Registers Headwater's storage metrics with vLLM's labels and adds up the reported
    values."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            metric.name: metric_types[Counter if metric.is_counter else Gauge](
                name=metric.name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
            )
            for metric in METRICS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric, *labels = name.split(_SEPARATOR)
            values = self.per_engine_labelvalues[engine_idx]
            bound = self._metrics[metric].labels(*values, *labels)
            if metric in _COUNTERS:
                bound.inc(value)
            else:
                bound.set(value)
