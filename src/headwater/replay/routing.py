"""Chooses an instance for each request, with the router's own policies and the current caches.

A real router learns about blocks from events, a moment later; the simulated router reads the
caches directly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.cache import TokenPath
from headwater.disagg.routing import Candidate, Policy, is_swamped, make_policy, prefills_itself
from headwater.replay.instance import SimInstance
from headwater.replay.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class SimRoute:
    """The instance that serves a request, and the instance that computes its prompt if it is
    another one."""

    server: SimInstance
    prefill: SimInstance | None
    uncached_tokens: int
    moved_tokens: int = 0
    """Prompt tokens that `server` lacks and gets by the hand-off; 0 without a hand-off."""

    @property
    def worker(self) -> SimInstance:
        """The instance that computes the prompt."""
        return self.prefill or self.server


class SimRouter:
    """Applies one policy to the instances that serve, and to those that prefill."""

    def __init__(self, policy: str, prefill_threshold: int) -> None:
        self._serving = make_policy(policy)
        self._prefilling = make_policy(policy)
        self._looks = policy == "cache_aware"
        self._threshold = prefill_threshold

    def choose(
        self, request: TraceRequest, instances: Sequence[SimInstance], now: float
    ) -> SimRoute:
        """The route of `request`."""
        if len(instances) == 1:
            return SimRoute(instances[0], None, 0)
        path = TokenPath(request.prompt()) if self._looks else None
        servers = [one for one in instances if one.role != "prefill"]
        server, cached = self._pick(self._serving, request, servers, path, now)
        uncached = request.input_length - cached
        if server.role != "decode" or prefills_itself(uncached, self._threshold):
            return SimRoute(server, None, uncached)
        helpers = [one for one in instances if one.role == "prefill"]
        helper, found = self._pick(self._prefilling, request, helpers, path, now)
        if is_swamped(helper.work.outstanding_tokens, server.work.outstanding_tokens):
            return SimRoute(server, None, uncached)
        return SimRoute(server, helper, request.input_length - found, moved_tokens=uncached)

    def _pick(
        self,
        policy: Policy,
        request: TraceRequest,
        instances: Sequence[SimInstance],
        path: TokenPath | None,
        now: float,
    ) -> tuple[SimInstance, int]:
        by_name = {one.name: one for one in instances}
        candidates = [
            Candidate(
                name=one.name,
                cached_tokens=0 if path is None else one.num_found(path),
                outstanding_tokens=one.work.outstanding_tokens,
                recent_tokens=one.work.recent.tokens(now=now),
                num_alive=one.num_alive,
            )
            for one in instances
        ]
        chosen = policy.choose(request.input_length, candidates)
        return by_name[chosen.name], chosen.cached_tokens
