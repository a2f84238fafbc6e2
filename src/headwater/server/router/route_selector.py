"""Selects the instances of one request: one that serves it, and optionally one that prefills."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headwater.clock import Clock
from headwater.disagg.routing import Policy, is_swamped, make_policy, prefills_itself
from headwater.server.router.config import RouterConfig
from headwater.server.router.instance import Instance
from headwater.server.router.prompts import PromptPath
from headwater.server.router.registry import SERVING, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChoice:
    """The instances of one attempt."""

    server: Instance
    """The instance that answers the client; its role is decode or mixed."""

    prefill: Instance | None = None
    """The instance that prefills; None when `server` does."""

    cached_tokens: int = 0
    """Prompt tokens cached on the instance that prefills, by its KV events."""

    uncached_tokens: int = 0
    moved_tokens: int = 0
    """Tokens handed off from `prefill` to `server`, as far as known."""

    is_last_prefill: bool = False
    """No other prefill instance is left: if `prefill` refuses, `server` prefills itself."""

    @property
    def worker(self) -> Instance:
        """The instance that prefills."""
        return self.prefill or self.server


class RouteSelector:
    """Applies the routing policy to each role."""

    def __init__(self, config: RouterConfig, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._threshold = config.prefill_threshold
        self._serving = make_policy(config.policy)
        self._prefilling = make_policy(config.policy)

    def choose(
        self,
        path: PromptPath,
        tried: Collection[Instance],
        *,
        owner: Instance | None = None,
    ) -> RouteChoice | None:
        """A route that excludes the `tried` instances, or None when no instance is left.

        With an `owner`, only that instance can answer.
        """
        servers = [entry for entry in self._registry.ready(SERVING) if entry not in tried]
        if owner is not None:
            servers = [entry for entry in servers if entry is owner]
        if not servers:
            return None
        server, cached = self._pick(self._serving, servers, path)
        if server.registration.role == "decode":
            route = self._with_prefill(server, cached, path, tried)
            if route is not None:
                return route
        return RouteChoice(
            server=server, cached_tokens=cached, uncached_tokens=path.num_tokens - cached
        )

    def _with_prefill(
        self, server: Instance, cached: int, path: PromptPath, tried: Collection[Instance]
    ) -> RouteChoice | None:
        if path.num_tokens and prefills_itself(path.num_tokens - cached, self._threshold):
            return None
        ready = [
            entry
            for entry in self._registry.ready({"prefill"})
            if entry not in tried and entry.registration.peer_address
        ]
        if not ready:
            return None
        prefill, found = self._pick(self._prefilling, ready, path)
        if is_swamped(prefill.outstanding_tokens, server.outstanding_tokens):
            return None
        return RouteChoice(
            server=server,
            prefill=prefill,
            cached_tokens=found,
            uncached_tokens=path.num_tokens - found,
            moved_tokens=path.num_tokens - cached,
            is_last_prefill=len(ready) == 1,
        )

    def _pick(
        self, policy: Policy, instances: Sequence[Instance], path: PromptPath
    ) -> tuple[Instance, int]:
        now = self._clock.now()
        by_name = {entry.name: entry for entry in instances}
        candidates = [
            entry.candidate(entry.view.match(path.hashes), now=now) for entry in instances
        ]
        chosen = policy.choose(path.num_tokens, candidates)
        return by_name[chosen.name], chosen.cached_tokens
