"""Copies that no sequence waits for: writes to lower tiers, and prefetch of expected sessions.

Both are planned between steps, each within its own bound. A block that is being written is
pinned, so it cannot be evicted or reused meanwhile.

Prefetch brings a session that announced its return up one tier, shortly before that time. It uses
only spare room: no request waits, the blocks would be admitted by the rule that admits requests,
and few blocks are in flight at once. A failed prefetch has no other effect: the session finds its
blocks where they are.
"""

from typing import NamedTuple

from headwater.cache import Demotion, JobOutcome, JobStatus, Match, TieredCache
from headwater.cache.sessions import SessionEntry
from headwater.scheduler.admission import admits
from headwater.scheduler.blocks import GrowthEstimate
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.loading import KVLoader
from headwater.scheduler.queues import SequenceTable
from headwater.types import JobId, Tier

_OFFLOAD_SHARE = 4
"""At most one device block in this many is being written."""


class OffloadJobs:
    """Plans what the write policy and preemptions want, within a bound for each link."""

    def __init__(self, cache: TieredCache, max_blocks: int) -> None:
        self._cache = cache
        spare = max(cache.config.device_blocks // _OFFLOAD_SHARE, 1)
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

    def finish_job(self, outcome: JobOutcome) -> None:
        """A transfer ended. One that timed out still has its executor, so it still counts."""
        if outcome.ending is JobStatus.TIMED_OUT:
            return
        plan = self._in_flight.pop(outcome.job, None)
        if plan is not None:
            self._num_blocks[plan.target] -= plan.num_blocks

    def _room(self, target: Tier) -> int:
        return max(self._limits[target] - self._num_blocks[target], 0)


_LEAD_S = 2.0
"""How long before its time a session is looked at."""

_RETRY_S = 0.25
"""After how long it is looked at again where there was no room; until its time has come."""

_PREFETCH_SHARE = 8
"""At most one device block in this many is on its way up at once."""

_MAX_SESSION_JOBS = 16
"""For one session; what is evicted as often is not worth more."""


class _Trial(NamedTuple):
    """A session that is to be looked at, at its time, after so many jobs for it."""

    at_s: float
    known: SessionEntry
    num_jobs: int


class Prefetch:
    """Plans promotions of sessions that are due, and hands them to `KVLoader`."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: TieredCache,
        table: SequenceTable,
        growth: GrowthEstimate,
        loader: KVLoader,
    ) -> None:
        tiers = cache.config.host_blocks > 0
        self._enabled = config.prefetch_sessions and config.prefix_caching and tiers
        self._cache = cache
        self._table = table
        self._growth = growth
        self._loader = loader
        self._max_blocks = max(cache.config.device_blocks // _PREFETCH_SHARE, 1)
        self._trials: list[_Trial] = []
        self._jobs: dict[JobId, tuple[_Trial, int]] = {}
        """Jobs in flight, each with the session it is for and its number of blocks."""
        self.num_blocks = 0
        """Blocks that were brought up, ever."""

    @property
    def wake_s(self) -> float | None:
        """When there is something to do although nothing landed."""
        if not self._enabled:
            return None
        times = [trial.at_s for trial in self._trials]
        due_s = self._cache.sessions.next_due_s
        if due_s is not None:
            times.append(due_s - _LEAD_S)
        return min(times, default=None)

    def plan(self, now: float) -> None:
        """Bring up what is due. Costs nothing while nothing is."""
        if not self._enabled:
            return
        due_s = self._cache.sessions.next_due_s
        if due_s is not None and due_s - _LEAD_S <= now:
            due = self._cache.sessions.take_due(now + _LEAD_S)
            self._trials += [_Trial(now, known, 0) for known in due]
        if self._trials:
            trials, self._trials = self._trials, []
            for trial in trials:
                self._try(trial, now)

    def finish_job(self, outcome: JobOutcome) -> None:
        """A transfer ended; if it was for a session, look at that again."""
        trial, num_blocks = self._jobs.pop(outcome.job, (None, 0))
        if trial is not None and outcome.ending is JobStatus.DONE:
            self.num_blocks += num_blocks
            self._trials.append(trial)

    def _try(self, trial: _Trial, now: float) -> None:
        known = trial.known
        if trial.at_s > now:
            self._trials.append(trial)
            return
        # One that came back, or was closed, is expected no longer.
        if known.due_s is None or trial.num_jobs >= _MAX_SESSION_JOBS:
            return
        match = self._cache.match_session(known)
        if match.device_blocks == match.num_blocks or match.loading is not None:
            return
        room = self._room(match)
        plan = self._cache.promote(match, limit_blocks=room, now=now) if room else None
        if plan is not None:
            self._loader.adopt(plan)
            again = _Trial(now, known, trial.num_jobs + 1)
            self._jobs[plan.job] = again, plan.num_blocks
        elif now < known.due_s:
            self._trials.append(trial._replace(at_s=now + _RETRY_S))

    def _room(self, match: Match) -> int:
        """Blocks that may be brought up now; 0 while somebody waits for room."""
        table = self._table
        if len(table.waiting):
            return 0
        on_the_way = sum(num_blocks for _, num_blocks in self._jobs.values())
        room = self._max_blocks - on_the_way
        wanted = min(match.host_blocks or match.storage_blocks, room)
        fits = admits(
            num_needed=wanted,
            num_available=self._cache.available_beside(match),
            num_growth=self._growth.num_blocks(table.running()),
            num_running=table.num_running,
        )
        return max(wanted, 0) if fits else 0
