"""The router's counters and its Prometheus scrape."""

from collections import Counter
from collections.abc import Sequence

from headwater.metrics import router_names
from headwater.metrics.names import Metric
from headwater.metrics.prometheus import Values, render_values
from headwater.server.router.instance import Instance


class RouterRecorder:
    """Totals since the router started; used on its event loop only."""

    def __init__(self) -> None:
        self._counts: dict[Metric, Counter[tuple[str, ...]]] = {
            metric: Counter() for metric in router_names.ROUTER_COUNTERS
        }

    def count(self, metric: Metric, *labels: str, amount: int = 1) -> None:
        """Add to a counter."""
        self._counts[metric][labels] += amount

    def prefills(self) -> list[dict[str, str | int]]:
        """Answered requests by the prefill and the decode instance they were sent to."""
        return [
            {"prefill": prefill, "decode": decode, "requests": number}
            for (prefill, decode), number in self._counts[router_names.ROUTER_PREFILLS].items()
        ]

    def render(self, instances: Sequence[Instance], *, now: float, stale_s: float) -> bytes:
        """One scrape: the totals, and the state of each instance."""
        values: dict[Metric, Values] = {
            metric: dict(counts) if metric.labels else {(): counts.get((), 0)}
            for metric, counts in self._counts.items()
        }
        values[router_names.ROUTER_INSTANCES] = {
            (entry.name, entry.registration.role, entry.state(now=now, stale_s=stale_s)): 1
            for entry in instances
        }
        values[router_names.ROUTER_TRUST] = {
            (entry.name, entry.trust.value): 1 for entry in instances
        }
        values[router_names.ROUTER_VIEW_BLOCKS] = {
            (entry.name,): entry.view.num_blocks for entry in instances
        }
        values[router_names.ROUTER_IN_FLIGHT] = {
            (entry.name,): entry.num_alive for entry in instances
        }
        values[router_names.ROUTER_GAPS] = {
            (entry.name,): entry.num_gaps for entry in instances
        }
        return render_values(values)
