"""Decides whether sequences wait for blocks on the host or in storage, or compute them.

A sequence that waits for a load has no slots and no lease: the job owns the target slots. When
the job has ended, an ordinary match finds the blocks on the device. Several sequences may wait
for one job. A deadline ends the wait, not the job, and after a failure the sequence computes
its blocks. A slow or broken tier therefore costs nothing but its hits.
"""

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from headwater.cache import (
    Job,
    JobOutcome,
    JobStatus,
    LoadJob,
    Lookup,
    Match,
    TieredCache,
    TokenPath,
)
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.load_state import (
    ANSWER_S,
    LoadDecision,
    LowerTierMatch,
    MeasuredRates,
    PendingLoad,
    QueueAhead,
    SequenceLoad,
    choose,
)
from headwater.scheduler.pacing import LoadForecast, LoadForecasts
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.types import Tier

FinishOverlapped = Callable[[Sequence, JobOutcome, float], None]

_MOST_JOBS = 8
"""Maximum number of loads that are started for one sequence. Blocks that are evicted so often
are not worth another load."""

_MEAN_OF = 32
"""The mean prompt length is that of about this many recent sequences."""

_LEAST_WAIT_S = 0.05
"""Smallest limit of a wait under the policy `priced`."""

_LINKS = {Tier.HOST: "host_to_device", Tier.STORAGE: "storage_to_host"}
"""The link of a load, by its source."""

_SHORTFALL = {
    JobStatus.TIMED_OUT: "timeout",
    JobStatus.FAILED: "load_failed",
    JobStatus.PARTIAL: "load_failed",
    JobStatus.DAMAGED: "damaged",
    JobStatus.ABSENT: "evicted_storage",
}


class StorageLookup(NamedTuple):
    """A question to storage for one sequence: how many of the first blocks of its path it
    has."""

    path: TokenPath
    num_blocks: int
    sequence: Sequence
    load: SequenceLoad


class PendingLookup:
    """A lookup in flight, as the owner of the transfer job, with the questions of all
    sequences."""

    def __init__(self, loader: "KVLoader", asked: list[StorageLookup]) -> None:
        self._loader = loader
        self.asked = asked

    def finish_job(self, job: Job, outcome: JobOutcome, now: float) -> None:
        """Let the sequences continue; the cache has added the blocks that storage has."""
        self._loader.finish_lookup(self.asked, outcome, now=now)


class KVLoader:
    """Decides which blocks are loaded and which sequences wait for them."""

    def __init__(self, config: SchedulerConfig, cache: TieredCache) -> None:
        self._policy = config.load_policy
        self._timeout_s = config.load_timeout_s
        self._cache = cache
        self._has_storage = cache.config.storage and config.prefix_caching
        self.rates = MeasuredRates()
        """Rates that the loop measured recently. The loop sets a new value here."""
        self.backlog_tokens = 0
        """Prompt tokens that running sequences still have to compute; set before admission."""
        self.num_waiting = 0
        """Waiting sequences other than the one being examined; set before admission."""
        self._plans: list[LoadJob] = []
        """Loads that are planned but not yet taken by the loop."""
        self._questions: list[StorageLookup] = []
        """Questions for storage, asked together."""
        self._queued = {Tier.HOST: 0, Tier.STORAGE: 0}
        """Blocks of the loads in flight, by source."""
        self._num_loads = 0
        """Loads in flight."""
        self._mean_tokens = 0.0
        """Mean prompt length of recent sequences."""
        self.finish_overlapped: FinishOverlapped | None = None
        """Called when a load has ended during which its sequence computed its first chunk."""
        self.layerwise = False
        """Whether the runner can compute a chunk before the load that it reads has ended."""
        self.overlappable: LoadJob | None = None
        """The load that the last call of `waits` started, if the sequence need not wait for its
        end."""
        self.forecasts = LoadForecasts(config.max_batched_tokens)
        self.choices: Counter[str] = Counter()
        """Priced decisions, by reason."""

    @property
    def awaits_end(self) -> bool:
        """Whether a copy or a lookup is in flight that will certainly end. One that has timed
        out may never end."""
        return bool(self._cache.num_live_jobs or self._questions)

    @property
    def num_questions(self) -> int:
        """Questions to storage that are not sent yet."""
        return len(self._questions)

    @property
    def has_plans(self) -> bool:
        """Whether `take_plans` would return something."""
        return bool(self._plans or self._questions)

    def enter(self, sequence: Sequence) -> bool:
        """A new sequence waits: ask storage for the blocks that no other tier has, while it
        queues. Returns whether the sequence should not be examined before the answer comes or
        is late."""
        if not self._has_storage or sequence.scores is not None:
            return False
        longest = (sequence.num_tokens - 1) // self._cache.block_tokens
        path = sequence.path()
        if not longest:
            return False
        match = self._cache.match(path, max_blocks=longest)
        if match.num_blocks == longest:
            return False
        mean = self._mean_tokens or sequence.num_tokens
        self._mean_tokens = mean + (sequence.num_tokens - mean) / _MEAN_OF
        load = sequence.load = self._make_load(sequence)
        load.is_asking = True
        load.needs_answer = self._needs_answer(load, match, longest)
        self._questions.append(StorageLookup(path, longest, sequence, load))
        return load.needs_answer

    def adopt(self, plan: LoadJob) -> None:
        """Hand `plan` to the loop. Other sequences that need its blocks may wait for it."""
        self._queued[plan.source] += plan.num_blocks
        self._num_loads += 1
        self._plans.append(plan)

    def still_waits(self, sequence: Sequence, now: float) -> bool:
        """Whether the load or lookup that `sequence` waited for is still in flight. Costs no
        match."""
        load = sequence.load
        if load is None or load.ended is not None:
            return False
        if load.until_s is None:
            return load.is_asking and _expects_answer(load, now)
        if now >= load.until_s:
            return False
        if load.is_asking:
            return load.needs_answer
        return load.job is not None and (
            load.policy != "best_effort" or load.job.source is not Tier.STORAGE
        )

    def waits(self, sequence: Sequence, match: Match, *, fits: bool, now: float) -> bool:
        """Whether `sequence` waits for blocks below the device. If it can start during the load
        that this call began, `overlappable` is that load. `fits` tells whether it could be
        admitted now."""
        self.overlappable = None
        load = sequence.load
        below = match.host_blocks + match.storage_blocks
        if load is None:
            if not below:
                return False
            load = sequence.load = self._make_load(sequence)
        if load.ended is not None:
            return False
        if not load.is_asking and not self._wants(load, match):
            return False
        if not fits or (load.job is None and not load.is_asking):
            # The timer limits the wait for one load. It does not run while the sequence waits
            # for room, nor between a load whose blocks were evicted again and the next one.
            load.until_s = None
        if fits and load.until_s is None:
            load.began_s, load.until_s = now, now + self._patience_s(sequence, load, match)
        if load.until_s is not None and now >= load.until_s:
            load.ended = "timeout"
            return False
        if load.is_asking:
            return fits and load.needs_answer
        return self._brings(sequence, load, match, fits=fits, now=now) and fits

    def take_plans(self, now: float) -> list[LoadJob | Lookup]:
        """Loads and lookups to start now; each is returned once. All questions to storage form
        one lookup."""
        self.forecasts.step = None  # it is scheduled
        plans: list[LoadJob | Lookup] = [*self._plans]
        self._plans.clear()
        if asked := self._questions:
            self._questions = []
            questions = [(each.path, each.num_blocks) for each in asked]
            owner = PendingLookup(self, asked)
            plans.append(self._cache.plan_lookup(questions, owner=owner))
            for each in asked:
                each.load.asked_s = now
        return plans

    def finish_lookup(
        self, asked: list[StorageLookup], outcome: JobOutcome, *, now: float
    ) -> None:
        """A lookup ended: load the blocks that storage has, or let the sequences continue
        without them."""
        found = outcome.found if outcome.status is JobStatus.DONE else [0] * len(asked)
        late = outcome.status is JobStatus.TIMED_OUT
        for each, num_blocks in zip(asked, found, strict=True):
            each.load.is_asking = False
            if outcome.status is not JobStatus.DONE:
                each.load.shortfall = "storage_timeout" if late else "storage_failed"
            elif num_blocks:
                self._load_found(each, now)

    def finish_load(
        self, pending: PendingLoad, job: LoadJob, outcome: JobOutcome, now: float
    ) -> None:
        """A load ended: the sequences that depend on it continue. A load that timed out no
        longer delays later loads either."""
        self._queued[job.source] -= job.num_blocks
        self._num_loads -= 1
        if pending.forecast is not None and outcome.status is JobStatus.DONE:
            self.forecasts.compare(pending.forecast, now)
        for sequence in pending.waiting:
            load = sequence.load
            if load is None:
                continue
            if load.job is job:
                load.job = None
            if outcome.status is not JobStatus.DONE:
                load.shortfall = _SHORTFALL.get(outcome.status)
                if outcome.status in (JobStatus.FAILED, JobStatus.TIMED_OUT):
                    load.ended = load.shortfall
        if pending.overlapped is not None and self.finish_overlapped is not None:
            self.finish_overlapped(pending.overlapped, outcome, now)

    def _load_found(self, asked: StorageLookup, now: float) -> None:
        """Storage has blocks of a sequence: load those that are not on the host."""
        sequence, load = asked.sequence, asked.load
        if self._queue_tokens > self._cache.config.host_blocks * self._cache.block_tokens / 2:
            # A long queue would fill the host, and blocks that are loaded so early would be
            # evicted before they are used. Admission loads them when the sequence is near the
            # head of the queue.
            return
        if sequence.state is SequenceState.WAITING and sequence.load is load and not load.ended:
            match = self._cache.match(asked.path, max_blocks=asked.num_blocks)
            # Blocks on the host are loaded at admission.
            if (
                match.storage_blocks
                and not match.host_blocks
                and self._wants(load, match, ahead=True)
            ):
                self._brings(sequence, load, match, fits=False, now=now)

    @property
    def _queue_tokens(self) -> float:
        """Estimated prompt tokens of the waiting sequences."""
        return self.num_waiting * self._mean_tokens

    def _make_load(self, sequence: Sequence) -> SequenceLoad:
        """The load state of a sequence, by its request or else by the settings."""
        request = sequence.request
        timeout_s = request.load_timeout_s
        return SequenceLoad(
            request.load_policy or self._policy,
            self._timeout_s if timeout_s is None else timeout_s,
        )

    def _needs_answer(self, load: SequenceLoad, match: Match, longest: int) -> bool:
        """Whether a load may be chosen if storage has all the blocks that memory lacks. If not,
        the sequence does not wait for the answer of storage, not even for one step."""
        if load.policy == "best_effort":
            return False
        host = match.host_blocks
        below = LowerTierMatch(host, longest - match.device_blocks - host)
        return self._choose(load, below, match, ahead=True).num_blocks > host

    def _wants(self, load: SequenceLoad, match: Match, *, ahead: bool = False) -> bool:
        """Whether more of `match` should be loaded. The decision is made at the first call.
        `ahead` means that the sequence has just entered the queue."""
        if not match.host_blocks and not match.storage_blocks:
            return False
        if load.choice is None:
            load.device_blocks = match.device_blocks
            load.below = LowerTierMatch(match.host_blocks, match.storage_blocks)
            load.choice = self._choose(load, load.below, match, ahead=ahead)
            self.choices[load.choice.reason] += 1
        if match.device_blocks < load.device_blocks + load.choice.num_blocks:
            return True
        return load.policy == "best_effort" and match.storage_blocks > 0

    def _choose(
        self, load: SequenceLoad, found: LowerTierMatch, match: Match, *, ahead: bool
    ) -> LoadDecision:
        if load.policy in ("wait", "deadline"):
            return LoadDecision(num_blocks=found.num_blocks, reason=f"policy_{load.policy}")
        if load.policy == "best_effort":
            found = LowerTierMatch(found.host, 0)
        return choose(
            found,
            rates=self.rates,
            # The loads of these blocks must not count as queued before themselves.
            queued=LowerTierMatch()
            if match.loading is not None
            else LowerTierMatch(self._queued[Tier.HOST], self._queued[Tier.STORAGE]),
            block_tokens=self._cache.block_tokens,
            max_wait_s=load.timeout_s,
            ahead=QueueAhead(
                # Sequences that wait before a new one are also computed before it.
                self.backlog_tokens + round(self._queue_tokens if ahead else 0),
                self.num_waiting,
                min(self._num_loads, self.num_waiting),
            ),
        )

    def _patience_s(self, sequence: Sequence, load: SequenceLoad, match: Match) -> float:
        """How long `sequence` may wait. Under the policy `priced`: twice the time to compute
        the missing tokens or twice the expected time of the load, whichever is longer."""
        if load.policy == "wait":
            return inf
        speed = self.rates.prefill_tokens_s
        if load.policy == "deadline" or not speed:
            return load.timeout_s
        missing = sequence.num_tokens - match.device_blocks * self._cache.block_tokens
        expected_s = 0.0 if load.choice is None else load.choice.load_s or 0.0
        return min(load.timeout_s, max(2 * missing / speed, 2 * expected_s, _LEAST_WAIT_S))

    def _brings(
        self, sequence: Sequence, load: SequenceLoad, match: Match, *, fits: bool, now: float
    ) -> bool:
        """Start a load of the next part one tier up. Returns whether a load is in flight to
        wait for. Device slots are taken only for a sequence that could be admitted."""
        job = match.loading
        if job is None:
            if (match.host_blocks and not fits) or load.num_jobs >= _MOST_JOBS:
                return False
            chosen = 0 if load.choice is None else load.choice.num_blocks
            wanted = load.device_blocks + chosen - match.device_blocks
            if load.policy == "best_effort" and not match.host_blocks:
                wanted = match.storage_blocks
            owner = PendingLoad(self.finish_load)
            job = self._cache.plan_load(
                match, limit_blocks=max(wanted, 0), now=now, owner=owner
            )
            if job is None:
                load.shortfall = "no_room"
                return False
            load.num_jobs += 1
            owner.forecast = self._forecast(job, now)
            self.adopt(job)
            if self._carries(job, sequence, whole=job.num_blocks >= wanted):
                self.overlappable = job
        if load.job is not job and isinstance(job.owner, PendingLoad):
            load.job = job
            job.owner.waiting.append(sequence)
        return load.policy != "best_effort" or match.host_blocks > 0

    def _forecast(self, job: LoadJob, now: float) -> LoadForecast | None:
        """How long `job` should take, after the other jobs on its link."""
        rate = self.rates.host if job.source is Tier.HOST else self.rates.storage
        if rate is None:
            return None
        transfer_s = rate.job_s(job.num_blocks, self._queued[job.source])
        return self.forecasts.make(_LINKS[job.source], transfer_s, self.rates, now)

    def _carries(self, plan: LoadJob, sequence: Sequence, *, whole: bool) -> bool:
        """Whether `sequence` may compute during `plan`: the plan loads everything that is to be
        loaded."""
        if sequence.receives or sequence.params.grammar:
            return False  # a late grammar mask would discard the chunk that is held back
        return self.layerwise and whole and plan.source is Tier.HOST


def _expects_answer(load: SequenceLoad, now: float) -> bool:
    """Whether storage was asked so recently that it is too early to examine the sequence."""
    late = load.asked_s is not None and now >= load.asked_s + ANSWER_S
    return load.needs_answer and not late
