"""A circuit breaker in front of a backend: a dead store costs hits, not time.

              failures in a row
    closed ──────────────────────▶ open ──── after a while ────▶ half open
       ▲                            ▲                               │ one call is let through
       │                            └────────── it fails ───────────┤
       └─────────────────────────── it succeeds ────────────────────┘

While it is open every call is answered at once, with StorageResting.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import TypeVar

from headwater.clock import Clock
from headwater.errors import (
    ConfigError,
    StorageCorrupt,
    StorageError,
    StorageResting,
    StorageTimeout,
)
from headwater.storage.base import BlockRead, BlockWrite, StorageBackend, StorageStats
from headwater.types import BlockKey

T = TypeVar("T")

log = logging.getLogger(__name__)


class BreakerState(Enum):
    CLOSED = "closed"
    """Calls go through."""

    OPEN = "open"
    """Calls are refused at once."""

    HALF_OPEN = "half_open"
    """One call is trying whether the backend is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When to stop asking, and when to ask again."""

    max_failures: int = 3
    """Failed calls in a row that open it."""

    recovery_s: float = 5.0
    """How long it stays open the first time."""

    max_recovery_s: float = 60.0
    """How long at most: each failed try doubles the wait."""

    def __post_init__(self) -> None:
        if self.max_failures < 1 or not 0 < self.recovery_s <= self.max_recovery_s:
            raise ConfigError(f"a breaker cannot work with {self}")


class Breaker:
    """The state machine alone. Thread-safe; time comes from the clock it is given."""

    def __init__(self, config: BreakerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._lock = Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._wait_s = config.recovery_s
        self._try_at_s = 0.0
        self.num_recoveries = 0
        """How often it closed again."""

    @property
    def state(self) -> BreakerState:
        return self._state

    def admits(self) -> bool:
        """Whether a call may go through. Each True is followed by `succeeded` or `failed`."""
        with self._lock:
            if self._state is BreakerState.OPEN and self._clock.now() >= self._try_at_s:
                self._state = BreakerState.HALF_OPEN
                return True
            return self._state is BreakerState.CLOSED

    def succeeded(self) -> None:
        with self._lock:
            if self._state is not BreakerState.CLOSED:
                self.num_recoveries += 1
                log.warning("storage answers again")
            self._state = BreakerState.CLOSED
            self._failures = 0
            self._wait_s = self._config.recovery_s

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._state is BreakerState.HALF_OPEN:
                self._wait_s = min(2 * self._wait_s, self._config.max_recovery_s)
            elif self._failures < self._config.max_failures:
                return
            self._state = BreakerState.OPEN
            self._try_at_s = self._clock.now() + self._wait_s
            log.warning(
                "storage failed %d times in a row, and is not asked for %g s",
                self._failures,
                self._wait_s,
            )


class GuardedStorage:
    """A backend behind a breaker. Errors are raised, and counted."""

    def __init__(self, backend: StorageBackend, breaker: Breaker) -> None:
        self._backend = backend
        self._breaker = breaker
        self._lock = Lock()
        self._reasons: Counter[str] = Counter()

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        return self._call(lambda: self._backend.contains(runs, timeout_s=timeout_s))

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        return self._call(lambda: self._backend.read(keys, into, timeout_s=timeout_s))

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        return self._call(
            lambda: self._backend.write(keys, blocks, parents=parents, timeout_s=timeout_s)
        )

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        return self._call(lambda: self._backend.remove(keys, timeout_s=timeout_s))

    def stats(self) -> StorageStats:
        """The backend's own, with the breaker's state and what it counted."""
        stats = self._backend.stats()
        with self._lock:
            reasons = Counter(stats.reasons) + self._reasons
        return dataclasses.replace(
            stats,
            reasons=dict(reasons),
            breaker=self._breaker.state.value,
            recoveries=self._breaker.num_recoveries,
        )

    def close(self) -> None:
        self._backend.close()

    def _call(self, call: Callable[[], T]) -> T:
        if not self._breaker.admits():
            self._count("breaker_open")
            raise StorageResting("storage failed lately, and is not asked again yet")
        try:
            answer = call()
        except StorageError as error:
            self._breaker.failed()
            self._count(_reason(error))
            raise
        except BaseException:
            self._breaker.failed()
            raise
        self._breaker.succeeded()
        return answer

    def _count(self, reason: str) -> None:
        with self._lock:
            self._reasons[reason] += 1


def _reason(error: StorageError) -> str:
    if isinstance(error, StorageTimeout):
        return "timeout"
    return error.reason if isinstance(error, StorageCorrupt) else "error"
