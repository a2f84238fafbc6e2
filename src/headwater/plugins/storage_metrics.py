"""Metrics of the storage below another engine: the same names as Headwater's own."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from headwater.storage import BreakerState, StorageStats
from headwater.transfer.mover import LinkTotals


class WaitingWrites(Protocol):
    """Writes that wait, as `WriteOrder` counts them."""

    num_blocks: int
    num_dropped: int


class PluginMetric(NamedTuple):
    """A metric's name and meaning. Prometheus appends `_total` to counters."""

    name: str
    help: str
    is_counter: bool
    labels: tuple[str, ...] = ()


class Sample(NamedTuple):
    """The value of one metric now; counters are totals since the start."""

    metric: PluginMetric
    value: float
    labels: tuple[str, ...] = ()


BYTES = PluginMetric(
    "headwater:transfer_bytes",
    "Bytes of blocks read from and written to storage.",
    True,
    ("link",),
)
SECONDS = PluginMetric(
    "headwater:transfer_seconds", "Seconds spent in storage calls.", True, ("link",)
)
FAILURES = PluginMetric(
    "headwater:transfer_failures",
    "Lookups, reads and writes that failed.",
    True,
    ("link", "reason"),
)
FAULTS = PluginMetric(
    "headwater:storage_faults", "Failures of the storage backend.", True, ("reason",)
)
READ_BREAKER = PluginMetric(
    "headwater:storage_breaker_open", "1 while reads from storage are stopped; else 0.", False
)
WRITE_BREAKER = PluginMetric(
    "headwater:storage_write_breaker_open",
    "1 while writes to storage are stopped; else 0.",
    False,
)
THREADS_LOST = PluginMetric(
    "headwater:storage_threads_lost",
    "Threads in storage calls that passed their deadline.",
    False,
)
USED = PluginMetric("headwater:storage_used_bytes", "Bytes that storage uses.", False)
EVICTED = PluginMetric("headwater:storage_blocks_evicted", "Blocks that storage evicted.", True)
WAITING = PluginMetric(
    "headwater:storage_writes_waiting", "Blocks that wait to be written.", False
)
DROPPED = PluginMetric(
    "headwater:storage_writes_dropped",
    "Blocks not written because too many waited; those least likely to be used again come first.",
    True,
)
METRICS = (
    BYTES, SECONDS, FAILURES, FAULTS, READ_BREAKER, WRITE_BREAKER,
    THREADS_LOST, USED, EVICTED, WAITING, DROPPED,
)  # fmt: skip


def sample_storage(
    stats: StorageStats, links: Mapping[str, LinkTotals], block_bytes: int
) -> Iterator[Sample]:
    """The current metrics of storage and of the links to it."""
    for link, totals in links.items():
        if link != "lookup":
            yield Sample(BYTES, totals.num_blocks * block_bytes, (link,))
        yield Sample(SECONDS, totals.busy_s, (link,))
        for reason, count in totals.failures.items():
            yield Sample(FAILURES, count, (link, reason))
    for reason, count in stats.reasons.items():
        yield Sample(FAULTS, count, (reason,))
    yield Sample(READ_BREAKER, _is_open(stats.breaker))
    yield Sample(WRITE_BREAKER, _is_open(stats.write_breaker))
    yield Sample(THREADS_LOST, stats.threads_lost)
    yield Sample(USED, stats.used_bytes or 0)
    yield Sample(EVICTED, stats.blocks_evicted)


def sample_writes(waiting: WaitingWrites) -> Iterator[Sample]:
    """What waits to be written now, and what was dropped so far."""
    yield Sample(WAITING, waiting.num_blocks)
    yield Sample(DROPPED, waiting.num_dropped)


def _is_open(state: str) -> int:
    return int(state in (BreakerState.OPEN.value, BreakerState.HALF_OPEN.value))
