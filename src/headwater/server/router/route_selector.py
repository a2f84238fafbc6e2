"""Selects the instances of one request: one that serves it, and optionally one that prefills."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headwater.clock import Clock
from headwater.disagg.routing import Policy, is_swamped, make_policy, prefills_itself
from headwater.server.router.config import RouterConfig
from headwater.server.router.instance import Instance
from headwater.server.router.prompts import PromptPaths
from headwater.server.router.protocol import ModelGroup
from headwater.server.router.registry import SERVING, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChoice:
    """The instances of one attempt."""

    server: Instance
    """The instance that answers the client; its role is decode or mixed."""

    prefill: Instance | None = None
    """The instance that prefills; None when `server` does."""

    cached_tokens: int = 0
    """Prompt tokens cached on the instance that prefills, according to its KV events."""

    uncached_tokens: int = 0
    moved_tokens: int = 0
    """Tokens handed off from `prefill` to `server`, as far as known."""

    prompt_tokens: int = 0
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
        paths: PromptPaths,
        tried: Collection[Instance],
        *,
        owner: Instance | None = None,
        group: ModelGroup | None = None,
    ) -> RouteChoice | None:
        """A route that excludes the `tried` instances, or None when no instance is left.

        With an `owner`, only that instance can answer; with a `group`, only instances of it.
        """
        servers = [
            entry
            for entry in self._registry.ready(SERVING)
            if entry not in tried
            and (owner is None or entry is owner)
            and (group is None or entry.group == group)
        ]
        servers = [entry for entry in servers if entry.registration.model == paths.model] or (
            servers  # one of the instances will answer that it does not serve this model
        )
        if not servers:
            return None
        server, cached = self._pick(self._serving, servers, paths)
        if server.registration.role == "decode":
            route = self._with_prefill(server, cached, paths, tried)
            if route is not None:
                return route
        num_tokens = paths.of(server).num_tokens
        return RouteChoice(
            server=server,
            cached_tokens=cached,
            uncached_tokens=num_tokens - cached,
            prompt_tokens=num_tokens,
        )

    def _with_prefill(
        self, server: Instance, cached: int, paths: PromptPaths, tried: Collection[Instance]
    ) -> RouteChoice | None:
        path = paths.of(server)
        if path.num_tokens and prefills_itself(path.num_tokens - cached, self._threshold):
            return None
        ready = [
            entry
            for entry in self._registry.ready({"prefill"})
            if entry not in tried
            and entry.registration.peer_address
            and entry.group == server.group
        ]
        if not ready:
            return None
        prefill, found = self._pick(self._prefilling, ready, paths)
        if is_swamped(prefill.outstanding_tokens, server.outstanding_tokens):
            return None
        return RouteChoice(
            server=server,
            prefill=prefill,
            cached_tokens=found,
            uncached_tokens=path.num_tokens - found,
            moved_tokens=path.num_tokens - cached,
            prompt_tokens=path.num_tokens,
            is_last_prefill=len(ready) == 1,
        )

    def _pick(
        self, policy: Policy, instances: Sequence[Instance], paths: PromptPaths
    ) -> tuple[Instance, int]:
        """One of `instances`, and how many tokens of the prompt it has cached."""
        now = self._clock.now()
        found = {entry.name: entry for entry in instances}
        cached = {entry.name: _cached_tokens(entry, paths) for entry in instances}
        # Tokenizers of two models may count differently; only uncached tokens are compared.
        most = max(paths.of(entry).num_tokens for entry in instances)
        candidates = [
            entry.candidate(
                cached[entry.name] + most - (paths.of(entry).num_tokens or most), now=now
            )
            for entry in instances
        ]
        chosen = policy.choose(most, candidates)
        return found[chosen.name], cached[chosen.name]


def _cached_tokens(instance: Instance, paths: PromptPaths) -> int:
    num_blocks = instance.view.match(paths.of(instance).hashes)
    return num_blocks * instance.registration.block_tokens
