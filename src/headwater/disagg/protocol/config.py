"""Settings of hand-offs: how long each side waits, and how much it accepts."""

from dataclasses import dataclass

from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """Limits of hand-offs. All times are durations: clocks of two instances are never compared."""

    term_s: float = 10.0
    """A lease ends this long after the last heartbeat that D received."""

    margin_s: float = 1.0
    """P assumes a lease that is shorter by this, so P stops before D frees the slots."""

    renew_s: float = 2.0
    """Time between two heartbeats."""

    resend_s: float = 1.0
    """Time after which a message without an answer is sent again."""

    start_timeout_s: float = 10.0
    """Longest wait for P's first answer."""

    reserve_timeout_s: float = 10.0
    """Longest wait for free blocks on D, once P has asked."""

    handoff_timeout_s: float = 120.0
    """Longest time from Start to the first token; after it, D computes the prompt itself."""

    fence_wait_s: float = 2.0
    """Longest wait for a fence; after it, the slots stay quarantined until the lease is closed.
    """

    return_after_s: float = 30.0
    """A preempted request that has waited this long to resume goes back to the router."""

    max_inflight: int = 64
    """Maximum number of hand-offs at once on P; further ones are refused."""

    pull_min_blocks: int = 4
    """P reads blocks from D only if at least this many are missing."""

    pull_timeout_s: float = 5.0
    """Longest wait for blocks read from D."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.renew_s < self.term_s - self.margin_s:
            raise ConfigError(
                f"renew_s must be less than term_s - margin_s, got renew_s={self.renew_s:g}, "
                f"term_s={self.term_s:g}, margin_s={self.margin_s:g}"
            )
