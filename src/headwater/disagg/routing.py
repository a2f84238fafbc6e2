"""Which instance a request goes to: pure policies over what is known of each candidate.

`cache_aware` is load-capped affinity by uncached work: the cost of an instance is the work it
would have to do before the first token, plus a little for the work it got lately; one that
got much more than its share is not asked at all. Affinity alone would send everything to
the instance that has the system prompt.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from headwater.errors import ConfigError

RECENT_S = 60.0
"""Work counts as recent for about this long; see `RecentWork`."""

RECENT_WEIGHT = 0.02
"""Tokens of this prompt that one token of recent work is worth."""

CAP = 1.5
"""An instance with more recent work than this many times the mean is left alone …"""

CAP_SLACK_TOKENS = 65_536
"""… unless it is less than this above the mean: a quiet cluster has no overload to avoid."""


BACKLOG_TOKENS = 65_536
"""Prompt tokens that wait on a prefill instance before decode instances compute theirs: two or
three seconds of a large one's work, beyond which handing over is not worth the wait."""


class Trust(Enum):
    """How far what is known of an instance's cache can be relied on."""

    EXACT = "exact"
    """Every event up to now was applied."""

    DEGRADED = "degraded"
    """What it said is known, but something since then is missing or late."""

    FALLBACK = "fallback"
    """Nothing is known; it is chosen by load alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a policy may know of an instance, for one prompt."""

    name: str
    cached_tokens: int = 0
    """Leading tokens of the prompt that the instance said it has; 0 where it said nothing."""

    outstanding_tokens: int = 0
    """Prompt tokens sent to it that it has still to compute."""

    recent_tokens: float = 0.0
    """Work it got lately; see `RecentWork`."""

    num_alive: int = 0
    """Requests it has."""


class Policy(Protocol):
    """Chooses; remembers at most whose turn it is."""

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        """One of `candidates`, of which there is at least one."""


class RoundRobin:
    """Each in turn, whatever it has and does."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class LeastLoad:
    """The one with the fewest requests; of those, with the least recent work."""

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda c: (c.num_alive, c.recent_tokens))


class CacheAware:
    """The one with the least to do before the first token, within its share of the load."""

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        mean = sum(c.recent_tokens for c in candidates) / len(candidates)
        timeout_check = [c for c in candidates if c.recent_tokens <= _cap(mean)]

        def cost(candidate: Candidate) -> tuple[float, int]:
            uncached = prompt_tokens - candidate.cached_tokens
            work = uncached + candidate.outstanding_tokens
            return work + RECENT_WEIGHT * candidate.recent_tokens, candidate.num_alive

        return min(timeout_check, key=cost)


_POLICIES: dict[str, Callable[[], Policy]] = {
    "cache_aware": CacheAware,
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
}

POLICIES = tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """A policy by its name on the command line."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return _POLICIES[name]()


def prefills_itself(uncached_tokens: int, threshold_tokens: int) -> bool:
    """Whether a decode instance should compute the rest of a prompt itself: what is left is
    less than handing it over is worth."""
    return uncached_tokens <= threshold_tokens


def is_swamped(prefill_tokens: int, decode_tokens: int) -> bool:
    """Whether a prefill instance has so much more to compute than the decode instance that this
    one had better help itself, and let its other sequences wait a little for it."""
    return prefill_tokens > decode_tokens + BACKLOG_TOKENS


class RecentWork:
    """Tokens assigned to one instance, each forgotten with a mean life of `RECENT_S`."""

    __slots__ = ("_at_s", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at_s = 0.0

    def add(self, tokens: int, *, now: float) -> None:
        """`tokens` were assigned now."""
        self._tokens = self.tokens(now=now) + tokens
        self._at_s = now

    def tokens(self, *, now: float) -> float:
        """What counts now."""
        return self._tokens * math.exp(-max(now - self._at_s, 0.0) / RECENT_S)


def _cap(mean: float) -> float:
    return max(CAP * mean, mean + CAP_SLACK_TOKENS)
