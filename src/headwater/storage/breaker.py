"""A circuit breaker: stops calls to a store that fails, and decides when to try again.

          failures in a row
closed ──────────────────────▶ open ──── after a wait ─────▶ half open
   ▲                            ▲                               │ one trial call
   │                            └── it fails or never ends ─────┤
   └─────────────────────────── it succeeds ────────────────────┘
"""

import logging
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from threading import Lock

from headwater.clock import Clock
from headwater.errors import ConfigError

log = logging.getLogger(__name__)


class BreakerState(Enum):
    CLOSED = "closed"
    """Calls go through."""

    OPEN = "open"
    """Calls are refused at once."""

    HALF_OPEN = "half_open"
    """One trial call is running; all others are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When to stop calling a store, and when to try again."""

    max_failures: int = 3
    """Failed calls of one kind in a row that open the breaker. A call that does not end counts
    too; until it ends, successful calls do not reset the count."""

    recovery_s: float = 5.0
    """Seconds for which the breaker stays open the first time."""

    max_recovery_s: float = 60.0
    """Upper bound of that wait. Each failed trial doubles the wait, and so does opening again
    within this time after closing."""

    def __post_init__(self) -> None:
        if self.max_failures < 1:
            raise ConfigError(
                f"max_failures of the storage breaker must be at least 1, got "
                f"{self.max_failures}"
            )
        if not 0 < self.recovery_s <= self.max_recovery_s:
            raise ConfigError(
                f"recovery_s of the storage breaker must be positive and at most "
                f"max_recovery_s, got {self.recovery_s} and {self.max_recovery_s}"
            )


class Breaker:
    """The state machine. Thread-safe; time comes from the given clock."""

    def __init__(self, config: BreakerConfig, clock: Clock, name: str = "calls") -> None:
        """`name` describes in log lines which calls this breaker stops."""
        self._config = config
        self._clock = clock
        self._name = name
        self._lock = Lock()
        self._state = BreakerState.CLOSED
        self._failures: Counter[str] = Counter()
        self._wait_s = config.recovery_s
        self._try_at_s = 0.0
        self._trial_ends_s = 0.0
        self._closed_at_s = float("-inf")
        self._reason = ""
        self.num_recoveries = 0
        """How often it closed again."""

    @property
    def state(self) -> BreakerState:
        return self._state

    def admits(self, timeout_s: float) -> bool:
        """Whether a call that may take `timeout_s` is allowed: the breaker is closed, or this
        is the trial call. The caller reports the end with `succeed` or `fail`."""
        return self._state is BreakerState.CLOSED or self.begin_trial(timeout_s)

    def begin_trial(self, timeout_s: float) -> bool:
        """Whether a trial call is due. If so, the caller must make the call, because none is
        due for other callers any more."""
        with self._lock:
            now = self._clock.now()
            if self._state is BreakerState.HALF_OPEN and now >= self._trial_ends_s:
                self._open(now)  # the trial call never ended
            if self._state is not BreakerState.OPEN or now < self._try_at_s:
                return False
            self._state = BreakerState.HALF_OPEN
            self._trial_ends_s = now + timeout_s
            return True

    def succeed(self, kind: str = "call", num_hung: int = 0) -> None:
        """Record that a call succeeded in time. Failures are counted for each `kind`, so that
        successful lookups do not hide failing reads. `num_hung` calls of the kind have passed
        their deadline and still run: they stay failures."""
        with self._lock:
            self._failures[kind] = min(self._failures[kind], num_hung)
            if self._state is BreakerState.HALF_OPEN:
                self._state = BreakerState.CLOSED
                self._failures.clear()
                self._closed_at_s = self._clock.now()
                self.num_recoveries += 1
                log.warning(
                    "storage breaker closed, storage answers again: calls=%s", self._name
                )

    def fail(self, kind: str = "call", reason: str = "error") -> None:
        """Record that a call failed, or did not end in time; `reason` is for the log line."""
        with self._lock:
            self._reason = reason
            self._failures[kind] += 1
            if (
                self._state is BreakerState.HALF_OPEN
                or self._failures[kind] >= self._config.max_failures
            ):
                self._open(self._clock.now())

    def _open(self, now: float) -> None:
        if self._state is BreakerState.OPEN:
            return  # a call that began before it opened
        reopens = (
            self._state is BreakerState.HALF_OPEN
            or now - self._closed_at_s < self._config.max_recovery_s
        )
        doubled = min(2 * self._wait_s, self._config.max_recovery_s)
        self._wait_s = doubled if reopens else self._config.recovery_s
        self._state = BreakerState.OPEN
        self._try_at_s = now + self._wait_s
        log.warning(
            "storage breaker opened: calls=%s reason=%s failures=%d retry_s=%g",
            *(self._name, self._reason, self._failures.total(), self._wait_s),
        )
