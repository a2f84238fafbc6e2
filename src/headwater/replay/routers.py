"""Which instance a request goes to, where there are several."""

from collections.abc import Callable, Sequence
from typing import Protocol

from headwater.errors import ConfigError
from headwater.replay.instance import SimInstance
from headwater.replay.trace import TraceRequest


class Router(Protocol):
    """Chooses an instance for each request, as it arrives."""

    def choose(
        self, request: TraceRequest, instances: Sequence[SimInstance]
    ) -> SimInstance: ...


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, request: TraceRequest, instances: Sequence[SimInstance]) -> SimInstance:
        """The next."""
        self._num_chosen += 1
        return instances[(self._num_chosen - 1) % len(instances)]


class LeastLoaded:
    """Where the fewest requests are; of those, the first."""

    def choose(self, request: TraceRequest, instances: Sequence[SimInstance]) -> SimInstance:
        """The one with the fewest."""
        return min(instances, key=lambda instance: instance.num_alive)


ROUTERS: dict[str, Callable[[], Router]] = {
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
"""Every policy by its name on the command line."""


def make_router(name: str) -> Router:
    """A router of that policy, which has seen nothing yet."""
    if name not in ROUTERS:
        raise ConfigError(
            f"unknown router policy {name!r}; known: {', '.join(sorted(ROUTERS))}"
        )
    return ROUTERS[name]()
