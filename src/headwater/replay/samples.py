"""What a deployment looked like over time: queue lengths and the occupancy of tiers."""

from collections.abc import Sequence

from headwater.replay.hands import SimStore
from headwater.replay.instance import SimInstance
from headwater.replay.trace import TraceRequest

_NUM_SAMPLES = 240
_NAMES = ("t_s", "waiting", "running", "device", "host", "storage")


class Samples:
    """One row each `every_s` of virtual time, over all instances together.

    Taken when a step ends, of what is then; steps in which nothing is decided change none of it,
    so it is the same whether they are taken one by one or many at once.
    """

    def __init__(self, every_s: float, start_s: float, store: SimStore | None) -> None:
        self._every_s = every_s
        self._next_s = start_s
        self._store = store
        self.columns: dict[str, list[float]] = {name: [] for name in _NAMES}
        """Times, counts, and shares of each tier's blocks that are in use."""

    @classmethod
    def for_trace(
        cls,
        requests: Sequence[TraceRequest],
        instances: Sequence[SimInstance],
        store: SimStore | None,
    ) -> "Samples":
        """As many as a picture needs over the time of `requests`."""
        start_s = requests[0].arrival_s if requests else 0.0
        length_s = (requests[-1].arrival_s - start_s) if requests else 0.0
        return cls(max(length_s / _NUM_SAMPLES, 0.1), start_s, store)

    def take(self, instances: Sequence[SimInstance], now: float) -> None:
        """A step ended at `now`."""
        if now < self._next_s:
            return
        row = self._row(instances)
        while self._next_s <= now:
            for name, value in zip(_NAMES, (self._next_s, *row), strict=True):
                self.columns[name].append(value)
            self._next_s += self._every_s

    def _row(self, instances: Sequence[SimInstance]) -> tuple[float, ...]:
        stats = [instance.cache.stats() for instance in instances]
        device = sum(s.device.total - s.device.free for s in stats)
        host = sum(s.host.total - s.host.free for s in stats)
        stored = 0.0 if self._store is None else len(self._store) / self._store.capacity_blocks
        return (
            sum(instance.num_waiting for instance in instances),
            sum(instance.scheduler.stats().num_running for instance in instances),
            device / max(sum(s.device.total for s in stats), 1),
            host / max(sum(s.host.total for s in stats), 1),
            stored,
        )
