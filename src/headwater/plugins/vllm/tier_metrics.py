"""Metrics of the tier in vLLM, under Headwater's names."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from headwater.plugins.storage_metrics import (
    METRICS,
    Sample,
    WaitingWrites,
    sample_storage,
    sample_writes,
)
from headwater.storage import StorageStats
from headwater.transfer.mover import LinkTotals


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric of the tier, as vLLM registers it."""
    return {
        metric.name: (
            OffloadingCounterMetadata if metric.is_counter else OffloadingGaugeMetadata
        )(documentation=metric.help, labelnames=metric.labels)
        for metric in METRICS
    }


class TierMetrics:
    """Turns totals into the increments that vLLM adds up."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def take(
        self,
        stats: StorageStats,
        links: Mapping[str, LinkTotals],
        block_bytes: int,
        waiting: WaitingWrites,
    ) -> Any:  # noqa: ANN401 - vLLM's OffloadingConnectorStats
        """The changes since the last call."""
        report = OffloadingConnectorStats()
        samples = sample_storage(stats, links, block_bytes)
        for sample in chain(samples, sample_writes(waiting)):
            self._add(report, sample)
        return report

    def _add(self, report: Any, sample: Sample) -> None:  # noqa: ANN401 - vLLM's
        if not sample.metric.is_counter:
            report.set_gauge(sample.metric.name, sample.value, sample.labels)
            return
        place = sample.metric.name, sample.labels
        grown = sample.value - self._last.get(place, 0.0)
        self._last[place] = sample.value
        if grown > 0:
            report.increase_counter(sample.metric.name, grown, sample.labels)
