"""Settings of hand-offs: how long each side waits, and how much it takes on."""

from dataclasses import dataclass

from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """How long each side waits for the other. Durations only: no two clocks are compared."""

    term_s: float = 10.0
    """A lease ends so long after the last heartbeat that D got."""

    margin_s: float = 1.0
    """P reckons with a term shorter by this, and so stops before D frees."""

    renew_s: float = 2.0
    """Between two heartbeats."""

    resend_s: float = 1.0
    """A question without an answer is asked again."""

    start_timeout_s: float = 10.0
    """Longest wait for P's first answer."""

    reserve_timeout_s: float = 10.0
    """Longest wait for room on D, once P has asked."""

    handoff_timeout_s: float = 120.0
    """Longest time from Start to the first token; then D computes."""

    fence_wait_s: float = 2.0
    """Longest wait for a fence before its slots are left in quarantine."""

    return_after_s: float = 30.0
    """A preempted request that has waited so long to resume goes back to the router."""

    max_inflight: int = 64
    """Most hand-offs at once on P; more are refused."""

    pull_min_blocks: int = 4
    """Fewest blocks that P asks D for, rather than computing them."""

    pull_timeout_s: float = 5.0
    """Longest wait for them."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.renew_s < self.term_s - self.margin_s:
            raise ConfigError(
                f"renew_s {self.renew_s:g} must leave time to renew a term of {self.term_s:g} s "
                f"less {self.margin_s:g} s"
            )
