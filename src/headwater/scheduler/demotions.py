"""Writes to lower tiers: as many in flight as the pool can spare, never more.

A block that is being written is pinned, so what is in flight is not available to anybody.
"""

from headwater.cache import Demotion, JobOutcome, JobStatus, TieredCache
from headwater.types import JobId, Tier

_SHARE = 4
"""At most one device block in this many is being written."""


class OffloadJobs:
    """Plans what the write policy and preemptions want, within a bound for each link."""

    def __init__(self, cache: TieredCache, max_blocks: int) -> None:
        self._cache = cache
        spare = max(cache.config.device_blocks // _SHARE, 1)
        self._limits = {Tier.HOST: min(max_blocks, spare), Tier.STORAGE: max_blocks}
        self._in_flight: dict[JobId, Demotion] = {}
        self._num_blocks = {Tier.HOST: 0, Tier.STORAGE: 0}
        """Blocks in flight to each; summed up here, because it is asked in every step."""

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def plan(self, now: float) -> list[Demotion]:
        """What may be written now. Costs nothing where nothing is wanted."""
        if not self._cache.transfers.writes.has_wishes:
            return []
        plans = self._cache.demote(
            limit_blocks=self._room(Tier.HOST), limit_stored=self._room(Tier.STORAGE), now=now
        )
        for plan in plans:
            self._in_flight[plan.job] = plan
            self._num_blocks[plan.target] += plan.num_blocks
        return plans

    def land(self, outcome: JobOutcome) -> None:
        """A transfer ended. One that timed out still has its executor, so it still counts."""
        if outcome.ending is JobStatus.TIMED_OUT:
            return
        plan = self._in_flight.pop(outcome.job, None)
        if plan is not None:
            self._num_blocks[plan.target] -= plan.num_blocks

    def _room(self, target: Tier) -> int:
        return max(self._limits[target] - self._num_blocks[target], 0)
