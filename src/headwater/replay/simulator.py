"""Arrivals, steps and copies of a whole deployment, in the order of virtual time.

Each instance's clock stands at the end of its last step, so the next thing to happen is always
the earliest of: a copy that arrives, a request of the trace, the instance whose clock is
furthest back. A router sees instances as they are at the end of the step they are in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from headwater.errors import ConfigError, InvariantError
from headwater.replay.cost import LINKS, OWN_LINKS, SHARED_LINKS, LinkCost
from headwater.replay.hands import SimStore
from headwater.replay.instance import SimInstance
from headwater.replay.links import SharedLink
from headwater.replay.routers import make_router
from headwater.replay.samples import Samples, Times
from headwater.replay.settings import SimConfig
from headwater.replay.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A replay that has ended, for whoever reports on it."""

    config: SimConfig
    instances: Sequence[SimInstance]
    links: Sequence[tuple[str, SharedLink]]
    """Every link by name; each instance has some of its own."""

    store: SimStore | None
    times: Times
    stored: Samples
    """Blocks in storage, over time."""


class Simulator:
    """A deployment that a trace is played to, once."""

    def __init__(self, config: SimConfig, requests: Sequence[TraceRequest]) -> None:
        """`requests` are in order of time."""
        self._config = config
        self._requests = requests
        self._times = Times.of_trace(requests)
        self._stored = Samples(self._times)
        costs = _link_costs(config)
        shared = {name: SharedLink(costs[name]) for name in SHARED_LINKS if name in costs}
        self._store = SimStore(config.storage_blocks) if config.storage_blocks else None
        self._links = list(shared.items())
        self.instances: list[SimInstance] = []
        for number in range(config.num_instances):
            own = {name: SharedLink(cost) for name, cost in costs.items() if name not in shared}
            self._links += own.items()
            links = own | shared
            self.instances.append(SimInstance(number, config, links, self._store, self._times))
        self._router = make_router(config.router)

    def play(self, advance: Callable[[int], None] = lambda ended: None) -> Run:
        """Serve every request to its end. `advance` is told of requests as they end."""
        requests, at = self._requests, 0
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
                chosen = self._router.choose(requests[at], self.instances)
                chosen.give(at, requests[at], now)
                at += 1
            else:
                instance.wake(now)
                ended = instance.turn(min(arrival_s, copy_s))
                if ended:
                    advance(ended)
        return self._ended()

    def _next(self) -> tuple[float, SimInstance]:
        """When the next turn of an instance begins, and whose it is."""
        if len(self.instances) == 1:
            return self.instances[0].ready_s(), self.instances[0]
        times = [instance.ready_s() for instance in self.instances]
        ready_s = min(times)
        return ready_s, self.instances[times.index(ready_s)]

    def _deliver(self, now: float) -> None:
        if self._store is not None:
            stored = float(len(self._store))
            self._stored.fill(now, lambda: (stored,))
        for _, link in self._links:
            if link.next_s() <= now:
                link.deliver(now)
        for instance in self.instances:
            if instance.mover.completions.has_any:
                instance.wake(now)

    def _ended(self) -> Run:
        for instance in self.instances:
            if instance.num_alive:
                raise InvariantError(f"{instance.num_alive} requests of a replay never ended")
        return Run(
            config=self._config,
            instances=self.instances,
            links=self._links,
            store=self._store,
            times=self._times,
            stored=self._stored,
        )


def _link_costs(config: SimConfig) -> dict[str, LinkCost]:
    """The links there are, given the tiers there are."""
    if not config.host_gib:
        return {}
    names = LINKS if config.storage_blocks else OWN_LINKS
    missing = [name for name in names if name not in config.machine.links]
    if missing:
        raise ConfigError(f"{config.machine.name} has no figures for: {', '.join(missing)}")
    return {name: config.machine.links[name] for name in names}
