"""Simulates arrivals, steps and copies of a whole deployment, in the order of virtual time.

The clock of each instance shows the end of its last step. So the next event is always the
earliest of: a copy that arrives, a request of the trace, the next turn of the instance whose
clock is furthest behind. A router sees instances in their state at the end of their current
step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from headwater.errors import ConfigError, InvariantError
from headwater.replay.ceiling import reusable_tokens
from headwater.replay.cost import OWN_LINKS, PEER_LINK, SHARED_LINKS, LinkCost
from headwater.replay.devices import SimStore
from headwater.replay.instance import SimInstance
from headwater.replay.links import SharedLink
from headwater.replay.network import SimFabric
from headwater.replay.request import SimRequest
from headwater.replay.routing import SimRouter
from headwater.replay.settings import SimConfig
from headwater.replay.time_series import Times, TimeSeries
from headwater.replay.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRun:
    """The result of a finished replay, for reports."""

    config: SimConfig
    instances: Sequence[SimInstance]
    links: Sequence[tuple[str, SharedLink]]
    """All links by name; each instance also has its own."""

    store: SimStore | None
    times: Times
    stored: TimeSeries
    """Blocks in storage over time."""


class Simulator:
    """A deployment that serves a trace, once."""

    def __init__(self, config: SimConfig, requests: Sequence[TraceRequest]) -> None:
        """`requests` are sorted by time."""
        self._config = config
        self._requests = requests
        self._reusable = reusable_tokens(requests, config.block_tokens)
        self._times = Times.of_trace(requests)
        self._stored = TimeSeries(self._times)
        costs = _link_costs(config)
        shared = {name: SharedLink(costs[name]) for name in SHARED_LINKS if name in costs}
        self._store = SimStore(config.storage_blocks) if config.storage_blocks else None
        self._links = list(shared.items())
        self._fabric = SimFabric() if config.num_prefill else None
        self.instances: list[SimInstance] = []
        for number in range(config.num_instances):
            own = {name: SharedLink(cost) for name, cost in costs.items() if name not in shared}
            self._links += own.items()
            links = own | shared
            self.instances.append(
                SimInstance(number, config, links, self._store, self._times, self._fabric)
            )
        self._router = SimRouter(config.router, config.prefill_threshold)

    def run(self, advance: Callable[[int], None] = lambda ended: None) -> SimulationRun:
        """Serve every request to its end. After each turn in which requests end, `advance` gets
        their number."""
        requests, at = self._requests, 0
        while True:
            arrival_s = requests[at].arrival_s if at < len(requests) else inf
            news_s = self._news_s()
            ready_s, instance = self._next()
            now = min(arrival_s, news_s, ready_s)
            if now == inf:
                break
            if news_s == now:
                self._deliver(now)
            elif arrival_s == now:
                self._arrive(at, requests[at])
                at += 1
            else:
                instance.wake(now)
                ended = instance.turn(min(arrival_s, news_s, self._unheard_s(instance)))
                if ended:
                    advance(ended)
        return self._ended()

    def _news_s(self) -> float:
        """When the next copy or message arrives."""
        copy_s = min((link.next_s() for _, link in self._links), default=inf)
        return copy_s if self._fabric is None else min(copy_s, self._fabric.next_s())

    def _next(self) -> tuple[float, SimInstance]:
        """When the next turn of an instance begins, and which instance it is."""
        if len(self.instances) == 1:
            return self.instances[0].ready_s(), self.instances[0]
        times = [instance.ready_s() for instance in self.instances]
        ready_s = min(times)
        return ready_s, self.instances[times.index(ready_s)]

    def _unheard_s(self, instance: SimInstance) -> float:
        """The earliest time at which an instance of the other role could send `instance`
        anything new."""
        if self._fabric is None:
            return inf
        others = [other for other in self.instances if other.role != instance.role]
        unheard_s = min(other.ready_s() for other in others)
        if all(other.core.has_work for other in others):
            return unheard_s
        # An idle instance may be woken by another instance of this role.
        alike = (other for other in self.instances if other.role == instance.role)
        return min(
            unheard_s, *(other.ready_s() for other in alike if other is not instance), inf
        )

    def _arrive(self, number: int, request: TraceRequest) -> None:
        now = request.arrival_s
        route = self._router.choose(request, self.instances, now)
        work = route.worker.work
        work.recent.add(route.uncached_tokens, now=now)
        if route.prefill is not None:
            route.server.work.recent.add(route.moved_tokens, now=now)
        work.outstanding_tokens += route.uncached_tokens
        served = SimRequest(
            arrival_s=now,
            prompt_tokens=request.input_length,
            reusable_tokens=next(self._reusable),
            prefill="" if route.prefill is None else route.prefill.name,
            uncached_tokens=route.uncached_tokens,
            work=work,
        )
        route.server.give(number, request, now, served)

    def _deliver(self, now: float) -> None:
        if self._store is not None:
            stored = float(len(self._store))
            self._stored.fill(now, lambda: (stored,))
        for _, link in self._links:
            if link.next_s() <= now:
                link.deliver(now)
        if self._fabric is not None:
            self._fabric.deliver(now)
        for instance in self.instances:
            if instance.mover.completions.has_any:
                instance.wake(now)

    def _ended(self) -> SimulationRun:
        for instance in self.instances:
            if instance.num_alive:
                raise InvariantError(f"{instance.num_alive} requests of a replay never ended")
        return SimulationRun(
            config=self._config,
            instances=self.instances,
            links=self._links,
            store=self._store,
            times=self._times,
            stored=self._stored,
        )


def _link_costs(config: SimConfig) -> dict[str, LinkCost]:
    """The links of this deployment, from its tiers."""
    names: tuple[str, ...] = OWN_LINKS if config.host_gib else ()
    if config.storage_blocks:
        names += SHARED_LINKS
    if config.num_prefill:
        names += (PEER_LINK,)
    missing = [name for name in names if name not in config.machine.links]
    if missing:
        raise ConfigError(
            f"{config.machine.name} has no figures for {', '.join(missing)}; use another --preset or --calibrate"
        )
    return {name: config.machine.links[name] for name in names}
