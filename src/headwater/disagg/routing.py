"""Routing policies: each chooses an instance for a request. Pure.

`cache_aware` prefers the instance with the least uncached work, up to a cap on its load. The
cost of an instance is the work before the first token, plus a small part of the work that it
got recently. An instance that got much more than its share is not chosen. Affinity alone would
send everything to the instance that has the system prompt.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from headwater.errors import ConfigError

RECENT_S = 60.0
"""Work counts as recent for about this long; see `RecentWork`."""

_RECENT_WEIGHT = 0.02
"""One token of recent work costs as much as this many prompt tokens."""

_CAP = 1.5
"""An instance with more recent work than this many times the mean is not chosen, unless the
work is at most `CAP_SLACK_TOKENS` above the mean."""

CAP_SLACK_TOKENS = 65_536
"""See `_CAP`: a cluster with little load has no overload to avoid."""


BACKLOG_TOKENS = 65_536
"""If a prefill instance has over this many prompt tokens more to compute than the decode
instance, the decode instance computes the prompt itself. A large instance computes these tokens
in two or three seconds; a hand-off is not worth a longer wait."""


class Trust(Enum):
    """How reliable the router's knowledge of an instance's cache is."""

    EXACT = "exact"
    """Every event up to now was applied."""

    DEGRADED = "degraded"
    """The reported blocks are known, but later events are missing or late."""

    FALLBACK = "fallback"
    """Nothing is known; the instance is chosen by load alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a policy knows about one instance, for one prompt."""

    name: str
    cached_tokens: int = 0
    """Leading tokens of the prompt that the instance reported as cached; 0 if it reported
    none."""

    outstanding_tokens: int = 0
    """Prompt tokens sent to it that it has not computed yet."""

    recent_tokens: float = 0.0
    """Work that it got recently; see `RecentWork`."""

    num_alive: int = 0
    """Requests on the instance."""


class Policy(Protocol):
    """Chooses an instance. Remembers at most the position of a rotation."""

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        """One of `candidates`, which is not empty."""


class RoundRobin:
    """One after the other, regardless of cache and load."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class LeastLoad:
    """The instance with the fewest requests; among equals, the one with the least recent
    work."""

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda c: (c.num_alive, c.recent_tokens))


class CacheAware:
    """The instance with the least work before the first token, within its share of the load."""

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        mean = sum(c.recent_tokens for c in candidates) / len(candidates)
        allowed = [c for c in candidates if c.recent_tokens <= _cap(mean)]

        def cost(candidate: Candidate) -> tuple[float, int]:
            uncached = prompt_tokens - candidate.cached_tokens
            work = uncached + candidate.outstanding_tokens
            return work + _RECENT_WEIGHT * candidate.recent_tokens, candidate.num_alive

        return min(allowed, key=cost)


_POLICIES: dict[str, Callable[[], Policy]] = {
    "cache_aware": CacheAware,
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
}

POLICIES = tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """A policy by its name on the command line."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown routing policy {name!r}; known: {', '.join(POLICIES)}")
    return _POLICIES[name]()


def prefills_itself(uncached_tokens: int, threshold_tokens: int) -> bool:
    """Whether a decode instance should compute the rest of a prompt itself, because the rest is
    too small for a hand-off."""
    return uncached_tokens <= threshold_tokens


def is_swamped(prefill_tokens: int, decode_tokens: int) -> bool:
    """Whether a prefill instance has so much more to compute that the decode instance should
    compute the prompt itself, although its other sequences then wait a little."""
    return prefill_tokens > decode_tokens + BACKLOG_TOKENS


class RecentWork:
    """Tokens assigned to one instance; each is forgotten after a mean time of `RECENT_S`."""

    __slots__ = ("_at_s", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at_s = 0.0

    def add(self, tokens: int, *, now: float) -> None:
        """Count `tokens` that were assigned now."""
        self._tokens = self.tokens(now=now) + tokens
        self._at_s = now

    def tokens(self, *, now: float) -> float:
        """The assigned tokens that are not forgotten yet."""
        return self._tokens * math.exp(-max(now - self._at_s, 0.0) / RECENT_S)


def _cap(mean: float) -> float:
    return max(_CAP * mean, mean + CAP_SLACK_TOKENS)
