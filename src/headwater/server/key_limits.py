"""Limits of API keys: requests in flight and requests per minute, over all HTTP workers."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from msgspec import Struct

from headwater.clock import Clock
from headwater.server.errors import RequestRefused
from headwater.server.keys import ApiKey

_MAX_IDLE_KEYS = 4096
"""Maximum number of remembered keys without requests: changes of the key file may bring any
number of keys."""

_REFILL_S = 60.0
"""After this time without requests a key may send its whole burst again."""


class KeyRefusal(Struct, frozen=True, kw_only=True):
    """Why a request of a key may not start now."""

    sentence: str
    code: str
    retry_after_s: float | None = None

    def error(self) -> RequestRefused:
        """The refusal as a 429."""
        return RequestRefused(
            self.sentence, status=429, code=self.code, retry_after_s=self.retry_after_s
        )


class KeyLimiter(Protocol):
    """Applies the limits of keys: `KeyLimits`, or a worker's connection to the supervisor."""

    def use(self, key: ApiKey) -> AbstractAsyncContextManager[None]:
        """A context that counts one request of `key`. Raises RequestRefused (429)."""


class _Usage:
    """Requests of one key: how many are in flight, and how many more may start now."""

    def __init__(self, now: float) -> None:
        self.num_running = 0
        self._tokens: float | None = None
        self.filled_s = now

    def start_delay_s(self, requests_per_minute: float | None, now: float) -> float:
        """Returns 0 and counts the request if it may start; otherwise the seconds to wait."""
        if requests_per_minute is None:
            self.filled_s = now
            return 0.0
        most, rate = max(1.0, requests_per_minute), requests_per_minute / 60
        before = most if self._tokens is None else self._tokens
        self._tokens = min(most, before + (now - self.filled_s) * rate)
        self.filled_s = now
        if self._tokens < 1.0:
            return (1.0 - self._tokens) / rate
        self._tokens -= 1.0
        return 0.0


class KeyLimits:
    """Counts the requests of all keys. Used on one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def start(self, key: ApiKey) -> KeyRefusal | None:
        """Count a request of `key` until `end`, or return why it may not start."""
        now = self._clock.now()
        usage = self._usage.get(key.name)
        if usage is None:
            self._forget_idle(now)
            usage = self._usage[key.name] = _Usage(now)
        if key.max_concurrency is not None and usage.num_running >= key.max_concurrency:
            return KeyRefusal(
                sentence=f"the key {key.name!r} has {usage.num_running} requests in flight, its "
                f"limit is {key.max_concurrency}; retry when one has ended",
                code="concurrency_limit",
            )
        delay_s = usage.start_delay_s(key.requests_per_minute, now)
        if delay_s:
            return KeyRefusal(
                sentence=f"the key {key.name!r} is over its limit of "
                f"{key.requests_per_minute:g} requests per minute; retry after {delay_s:.1f} s",
                code="rate_limit",
                retry_after_s=delay_s,
            )
        usage.num_running += 1
        return None

    def end(self, name: str) -> None:
        """Stop counting a request of the key `name` that has ended."""
        self._usage[name].num_running -= 1

    @asynccontextmanager
    async def use(self, key: ApiKey) -> AsyncIterator[None]:
        """A context that counts one request of `key`. Raises RequestRefused (429)."""
        refusal = self.start(key)
        if refusal is not None:
            raise refusal.error()
        try:
            yield
        finally:
            self.end(key.name)

    def _forget_idle(self, now: float) -> None:
        if len(self._usage) >= _MAX_IDLE_KEYS:
            self._usage = {
                name: usage
                for name, usage in self._usage.items()
                if usage.num_running or now - usage.filled_s < _REFILL_S
            }
