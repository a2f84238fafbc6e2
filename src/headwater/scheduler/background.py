"""Copies that no sequence waits for: writes to lower tiers, and sessions that are expected."""

from headwater.cache import Demotion, JobOutcome, TieredCache
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.demotions import OffloadJobs
from headwater.scheduler.growth import GrowthEstimate
from headwater.scheduler.loading import KVLoader
from headwater.scheduler.prefetch import Prefetch
from headwater.scheduler.roster import SequenceTable


class Background:
    """Plans them between steps, each within its own bound."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: TieredCache,
        roster: SequenceTable,
        growth: GrowthEstimate,
        loads: KVLoader,
    ) -> None:
        self._demotions = OffloadJobs(cache, config.max_write_blocks)
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

    def land(self, outcome: JobOutcome) -> None:
        """A transfer ended."""
        self._demotions.land(outcome)
        self.prefetch.land(outcome)
