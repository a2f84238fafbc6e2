"""Copies that no sequence waits for: writes to lower tiers, and sessions that are expected."""

from headwater.cache import Demotion, Outcome, TieredCache
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.demotions import Demotions
from headwater.scheduler.growth import GrowthEstimate
from headwater.scheduler.loading import Loads
from headwater.scheduler.prefetch import Prefetch
from headwater.scheduler.roster import Roster


class Background:
    """Plans them between steps, each within its own bound."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: TieredCache,
        roster: Roster,
        growth: GrowthEstimate,
        loads: Loads,
    ) -> None:
        self._demotions = Demotions(cache, config.max_write_blocks)
        self.prefetch = Prefetch(config, cache, roster, growth, loads)

    @property
    def num_in_flight(self) -> int:
        """Writes that have not ended; what comes up is counted with the loads."""
        return self._demotions.num_in_flight

    @property
    def wake_s(self) -> float | None:
        """When there is something to do although nothing landed."""
        return self.prefetch.wake_s

    def plan(self, now: float) -> list[Demotion]:
        """What may be written now. What may be brought up is left with the loads."""
        self.prefetch.plan(now)
        return self._demotions.plan(now)

    def land(self, outcome: Outcome) -> None:
        """A transfer ended."""
        self._demotions.land(outcome)
        self.prefetch.land(outcome)
