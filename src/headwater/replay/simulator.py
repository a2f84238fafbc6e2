"""Arrivals, steps and copies of a whole deployment, in the order of virtual time.

Each instance's clock stands at the end of its last step, so the next thing to happen is always
the earliest of: a copy that arrives, a request of the trace, the instance whose clock is
furthest back. A router sees instances as they are at the end of the step they are in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from headwater.errors import ConfigError, InvariantError
from headwater.replay.cost import LINKS, LinkCost
from headwater.replay.hands import SimStore
from headwater.replay.instance import SimInstance
from headwater.replay.links import SharedLink
from headwater.replay.routers import make_router
from headwater.replay.samples import Samples
from headwater.replay.settings import SimConfig
from headwater.replay.trace import TraceRequest

_OF_STORAGE = ("host_to_storage", "storage_to_host", "lookup")
"""Links that all instances share: they lead to the one storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A replay that has ended, for whoever reports on it."""

    config: SimConfig
    instances: Sequence[SimInstance]
    links: Sequence[tuple[str, SharedLink]]
    """Every link by name; each instance has some of its own."""

    samples: Samples
    store: SimStore | None


class Simulator:
    """A deployment that a trace is played to, once."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        costs = _link_costs(config)
        shared = {name: SharedLink(costs[name]) for name in _OF_STORAGE if name in costs}
        self.store = SimStore(config.storage_blocks) if config.storage_blocks else None
        self.instances: list[SimInstance] = []
        self._links = list(shared.items())
        for number in range(config.num_instances):
            own = {name: SharedLink(cost) for name, cost in costs.items() if name not in shared}
            self._links += own.items()
            self.instances.append(SimInstance(number, config, own | shared, self.store))
        self._router = make_router(config.router)

    def play(
        self,
        requests: Sequence[TraceRequest],
        advance: Callable[[int], None] = lambda ended: None,
    ) -> Run:
        """Serve `requests`, which are in order of time, to their end. `advance` is told of
        requests as they end."""
        samples = Samples.for_trace(requests, self.instances, self.store)
        at = 0
        while True:
            arrival_s = requests[at].arrival_s if at < len(requests) else inf
            copy_s = min((link.next_s() for _, link in self._links), default=inf)
            ready_s, instance = self._next()
            now = min(arrival_s, copy_s, ready_s)
            if now == inf:
                break
            if copy_s == now:
                self._deliver(now)
            elif arrival_s == now:
                self._arrive(at, requests[at])
                at += 1
            else:
                instance.wake(now)
                ended = instance.turn(min(arrival_s, copy_s))
                samples.take(self.instances, instance.clock.now())
                if ended:
                    advance(ended)
        self._require_all_ended()
        return Run(
            config=self._config,
            instances=self.instances,
            links=self._links,
            samples=samples,
            store=self.store,
        )

    def _next(self) -> tuple[float, SimInstance]:
        """The instance whose turn comes first, and when."""
        if len(self.instances) == 1:
            return self.instances[0].ready_s(), self.instances[0]
        times = [instance.ready_s() for instance in self.instances]
        ready_s = min(times)
        return ready_s, self.instances[times.index(ready_s)]

    def _deliver(self, now: float) -> None:
        for _, link in self._links:
            if link.next_s() <= now:
                link.deliver(now)
        for instance in self.instances:
            if instance.mover.completions.has_any:
                instance.wake(now)

    def _arrive(self, number: int, request: TraceRequest) -> None:
        instance = self._router.choose(request, self.instances)
        instance.give(number, request, request.arrival_s)

    def _require_all_ended(self) -> None:
        for instance in self.instances:
            if instance.num_alive:
                raise InvariantError(f"{instance.num_alive} requests of a replay never ended")


def _link_costs(config: SimConfig) -> dict[str, LinkCost]:
    """The links there are, given the tiers there are."""
    if not config.host_gib:
        return {}
    names = LINKS if config.storage_blocks else LINKS[:2]
    missing = [name for name in names if name not in config.machine.links]
    if missing:
        raise ConfigError(f"{config.machine.name} has no figures for: {', '.join(missing)}")
    return {name: config.machine.links[name] for name in names}
