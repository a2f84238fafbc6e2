"""Copies that no sequence waits for: writes to lower tiers, and prefetch of expected sessions.

Both are planned between steps, each within its own bound. No slot that a write reads is used
again before the write ends.

Prefetch brings a session that announced its return up one tier, shortly before that time. It uses
only spare room: no request waits, the blocks would be admitted by the rule that admits requests,
and few blocks are in flight at once. A failed prefetch has no other effect: the session finds its
blocks where they are.
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from headwater.cache import Job, JobOutcome, JobStatus, LoadJob, Match, OffloadJob, TieredCache
from headwater.cache.sessions import SessionEntry
from headwater.scheduler.admission import admits
from headwater.scheduler.blocks import GrowthEstimate
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.load_state import PendingLoad
from headwater.scheduler.loading import KVLoader
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.sequence import Sequence
from headwater.types import Tier

_OFFLOAD_STEPS = 2
"""Until the speed of the link is known, the blocks that this many steps compute may be in flight
to the host: at least one device block in `_LEAST_SHARE`, at most one in `_MOST_SHARE`."""

_LEAST_SHARE = 8
_MOST_SHARE = 2

_MAX_OFFLOAD_S = 0.25
"""Then the writes in flight take the link at most this time. An admission may have to wait for
them: on a slow link, losing a block is better than a late first token."""

_KEPT_SHARE = 8
"""One device block in this many is never being written: running sequences take their next blocks
from these. All others may be written at once, because many requests may end in one step. With a
full host their whole paths are written, and what is not being written when the next requests are
admitted is lost. With an eighth of the device as the limit, the turns of sessions found as little
as 0.79 of what they could (64 sessions of an 8B model on an H200, 16 clients, simulated)."""


class OffloadPlanner:
    """Plans the writes of the write policy and of preemptions, within a bound for each link."""

    def __init__(self, cache: TieredCache, config: SchedulerConfig) -> None:
        self._cache = cache
        device_blocks = cache.config.device_blocks
        self._step_tokens = _OFFLOAD_STEPS * config.max_batched_tokens
        self._most_to_host = max(device_blocks - device_blocks // _KEPT_SHARE, 1)
        of_steps = min(self._step_tokens // cache.block_tokens, device_blocks // _MOST_SHARE)
        first = max(device_blocks // _LEAST_SHARE, of_steps, 1)
        self._limits = {Tier.HOST: first, Tier.STORAGE: config.max_write_blocks}
        self._num_blocks = {Tier.HOST: 0, Tier.STORAGE: 0}
        """Blocks in flight to each tier. A running sum, because every step reads it."""

    def plan(self, waiting: Iterable[Sequence], now: float) -> list[OffloadJob]:
        """The writes to start now, before the `waiting` sequences are admitted. Costs little while
        there is nothing to write."""
        to_store = self._room(Tier.STORAGE)
        expected = self._needed(waiting)
        if not self._cache.may_offload(num_expected=expected, can_store=to_store > 0):
            return []
        plans = self._cache.plan_offloads(
            limit_blocks=self._room(Tier.HOST),
            limit_stored=to_store,
            now=now,
            owner=self,
        )
        for plan in plans:
            self._num_blocks[plan.target] += plan.num_blocks
        return plans

    def limit_to(self, blocks_s: float | None) -> None:
        """Limit the writes in flight to the host, given that the link writes up to `blocks_s`
        blocks per second; None before the first write."""
        if blocks_s is not None:
            most = max(int(_MAX_OFFLOAD_S * blocks_s), 1)
            self._limits[Tier.HOST] = min(self._most_to_host, most)

    def finish_job(self, job: Job, outcome: JobOutcome, now: float) -> None:
        """Stop counting a write that ended. A timed-out write counts until its executor is
        quiet: this bounds the slots that lost calls keep from other use."""
        if outcome.status is not JobStatus.TIMED_OUT and isinstance(job, OffloadJob):
            self._num_blocks[job.target] -= job.num_blocks

    def _needed(self, waiting: Iterable[Sequence]) -> int:
        """Blocks of the sequences that the next steps admit, if none of them is cached."""
        blocks, tokens = 0, self._step_tokens
        for sequence in waiting:
            if tokens <= 0:
                break
            blocks += sequence.num_blocks_wanted
            tokens -= sequence.num_tokens
        return blocks

    def _room(self, target: Tier) -> int:
        return max(self._limits[target] - self._num_blocks[target], 0)


_LEAD_S = 2.0
"""How long before the announced time a session is examined."""

_RETRY_S = 0.25
"""A session for which there was no room is examined again after this time, but not after its
announced return."""

_PREFETCH_SHARE = 8
"""At most one device block in this many is being prefetched at once."""

_MAX_SESSION_JOBS = 16
"""Maximum number of loads for one session. Blocks that are evicted so often are not worth
another load."""


class _Trial(NamedTuple):
    """A session to examine at a given time, and the number of jobs started for it."""

    at_s: float
    entry: SessionEntry
    num_jobs: int


class Prefetch:
    """Plans loads of sessions that are due, and gives them to `KVLoader`."""

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
        self._num_loading = 0
        """Blocks of the loads in flight."""
        self.num_blocks = 0
        """Blocks prefetched since the start."""

    @property
    def wake_s(self) -> float | None:
        """When `plan` should examine a session next; None if no session is expected."""
        if not self._enabled:
            return None
        times = [trial.at_s for trial in self._trials]
        due_s = self._cache.next_due_s
        if due_s is not None:
            times.append(due_s - _LEAD_S)
        return min(times, default=None)

    def plan(self, now: float) -> None:
        """Prefetch the sessions that are due. Costs nothing while none is."""
        if not self._enabled:
            return
        due_s = self._cache.next_due_s
        if due_s is not None and due_s - _LEAD_S <= now:
            due = self._cache.take_due_sessions(now + _LEAD_S)
            self._trials += [_Trial(now, entry, 0) for entry in due]
        if self._trials:
            trials, self._trials = self._trials, []
            for trial in trials:
                self._try(trial, now)

    def _finish_load(
        self,
        trial: _Trial,
        pending: PendingLoad,
        job: LoadJob,
        outcome: JobOutcome,
        now: float,
    ) -> None:
        """A load of a session ended. Examine the session again if the load succeeded, and let the
        requests continue that waited for it."""
        self._num_loading -= job.num_blocks
        if outcome.status is JobStatus.DONE:
            self.num_blocks += job.num_blocks
            self._trials.append(trial)
        self._loader.finish_load(pending, job, outcome, now)

    def _try(self, trial: _Trial, now: float) -> None:
        entry = trial.entry
        if trial.at_s > now:
            self._trials.append(trial)
            return
        # A session that returned or was closed is not expected any more.
        if entry.due_s is None or trial.num_jobs >= _MAX_SESSION_JOBS:
            return
        match = self._cache.match_session(entry)
        if match.device_blocks == match.num_blocks or match.loading is not None:
            return
        room = self._room(match)
        again = _Trial(now, entry, trial.num_jobs + 1)
        owner = PendingLoad(partial(self._finish_load, again))
        plan = None
        if room:
            plan = self._cache.plan_load(match, limit_blocks=room, now=now, owner=owner)
        if plan is not None:
            self._loader.adopt(plan)
            self._num_loading += plan.num_blocks
        elif now < entry.due_s:
            self._trials.append(trial._replace(at_s=now + _RETRY_S))

    def _room(self, match: Match) -> int:
        """Blocks that may be prefetched now; 0 while a sequence waits for room."""
        table = self._table
        if len(table.waiting):
            return 0
        room = self._max_blocks - self._num_loading
        wanted = min(match.host_blocks or match.storage_blocks, room)
        fits = admits(
            num_needed=wanted,
            num_available=self._cache.available_beside(match),
            num_growth=self._growth.num_blocks(table.running()),
            num_running=table.num_running,
        )
        return max(wanted, 0) if fits else 0
