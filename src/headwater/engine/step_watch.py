"""Log lines about the steps of a real engine: slow steps, and a host tier that becomes full.

A simulated engine has no watch, because its time is not real.
"""

import logging

from headwater.clock import Clock
from headwater.metrics.stats import TierStats

log = logging.getLogger(__name__)

SLOW_S = 1.0
"""Shorter steps are never reported."""

_SLOW_FACTOR = 10.0
"""A slow step takes this many times the usual time of steps with about as many tokens. Steps with
long prompts take seconds on a CPU."""

_AVERAGE_WEIGHT = 0.05
_QUIET_S = 10.0
"""Shortest time between two lines about slow steps."""

_LOOK_S = 1.0


class StepWatch:
    """Called by the engine loop for each step, on its thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._usual_s: dict[int, float] = {}
        """Average duration by size of a step. The key is the number of bits of the token count,
        so steps of 256 to 511 tokens share an entry."""
        self._last_tokens = 0
        self._num_slow = 0
        self._silent_until_s = float("-inf")
        self._look_at_s = float("-inf")
        self._host_was_full = False

    def now(self) -> float:
        return self._clock.now()

    def note_step(self, began_s: float, num_tokens: int) -> None:
        """Measure a step that began at `began_s`, submitted `num_tokens` and has just ended;
        log a slow one.

        With two steps in flight, it may have waited for the tokens of the previous step.
        """
        size = max(num_tokens, self._last_tokens).bit_length()
        self._last_tokens = num_tokens
        now = self._clock.now()
        took_s = now - began_s
        usual_s = self._usual_s.get(size, took_s)
        if took_s >= SLOW_S and took_s > _SLOW_FACTOR * usual_s:
            self._num_slow += 1
            if now >= self._silent_until_s:
                log.warning(
                    "slow step: took_s=%.2f usual_s=%.4f tokens=%d slow_steps=%d",
                    *(took_s, usual_s, num_tokens, self._num_slow),
                )
                self._silent_until_s = now + _QUIET_S
        self._usual_s[size] = usual_s + _AVERAGE_WEIGHT * (took_s - usual_s)

    @property
    def wants_tiers(self) -> bool:
        """Whether to read the state of the host tier now: at most once per second, until it was
        full."""
        return not self._host_was_full and self._clock.now() >= self._look_at_s

    def note_host(self, host: TierStats) -> None:
        """Note the current state of the host tier."""
        self._look_at_s = self._clock.now() + _LOOK_S
        if host.num_blocks and not host.free:
            self._host_was_full = True
            log.info(
                "host tier is full; from now on blocks are evicted from it: blocks=%d cached=%d",
                *(host.num_blocks, host.cached),
            )
