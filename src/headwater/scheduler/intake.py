"""Which waiting sequences start now."""

from collections import Counter, deque
from collections.abc import Iterator
from math import inf

from headwater.cache import Match
from headwater.scheduler.admission import AdmissionResult, admits
from headwater.scheduler.batch import Chunk
from headwater.scheduler.budget import StepBudget
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.follow import starts_following, still_follows
from headwater.scheduler.growth import GrowthEstimate
from headwater.scheduler.holdings import BlockAllocator
from headwater.scheduler.loading import KVLoader
from headwater.scheduler.roster import SequenceTable
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.usage import LoadUsage, Usage

_RECENT_LOADS = 16

_BIDING_A_PLACE = 4
"""For each sequence that may run, how many are looked past that wait for a load or a leader."""

_MOST_RIDDEN_BLOCKS = 16
"""Of a promotion that a step with decodes may wait for: two or three milliseconds on a GPU."""


class Admission:
    """Goes through the queue in order and starts what `admits` lets in."""

    def __init__(
        self,
        config: SchedulerConfig,
        roster: SequenceTable,
        holdings: BlockAllocator,
        growth: GrowthEstimate,
        loads: KVLoader,
    ) -> None:
        self._config = config
        self._roster = roster
        self._holdings = holdings
        self._growth = growth
        self._loads = loads
        self._most_biding = _BIDING_A_PLACE * config.max_num_seqs
        self._looked_at: tuple[object, ...] | None = None
        """What `admit` saw when it let nobody in."""
        self.recheck_s = inf
        """When it would see another thing although nothing has happened."""
        self.is_paused = False
        """Whether only preempted sequences, which are not new, may start."""
        self.num_follows = 0
        self.num_admitted = 0
        self.prompt_tokens = 0
        self.queue_s = 0.0
        self.found_tokens: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.recent_loads: deque[LoadUsage] = deque(maxlen=_RECENT_LOADS)
        """What the last requests with blocks in lower tiers did about them."""

    @property
    def has_candidates(self) -> bool:
        """Whether anyone waits who may start at all."""
        waiting = self._roster.waiting
        return (waiting.num_preempted if self.is_paused else len(waiting)) > 0

    @property
    def is_futile(self) -> bool:
        """Whether `admit`, called again before `recheck_s`, would change nothing: it let nobody
        in, and there is neither more room nor anybody else since."""
        return self._looked_at == self._sight() and self._growth.is_calm

    def look_again(self) -> None:
        """Something changed that `admit` has not seen."""
        self._looked_at = None

    def admit(self, budget: StepBudget, now: float) -> list[Chunk]:
        """Start waiting sequences while the step has room; their first chunks.

        A blocked one is looked past, unless it was passed too often or was preempted: nothing
        passes such a one, so it is next. How many are looked at does not grow with how many
        wait.
        """
        growth = self._growth.num_blocks(self._roster.running())
        chunks: list[Chunk] = []
        blocked: list[Sequence] = []
        patience, num_biding = self._config.max_passes, 0
        self.recheck_s = inf
        for sequence in self._candidates():
            own = self._growth.num_blocks((sequence,))
            verdict = self._start(sequence, growth + own, now)
            if verdict is AdmissionResult.ADMITTED:
                growth += own
                budget.spend_place()
                if sequence.state is SequenceState.PREFILL:
                    chunks.append(budget.spend_chunk(sequence))
                patience -= _pass(blocked)
            elif verdict is AdmissionResult.BLOCKED:
                blocked.append(sequence)
                patience = min(patience, self._patience(sequence))
            else:
                num_biding += 1
            if verdict is not AdmissionResult.ADMITTED:
                self.recheck_s = min(self.recheck_s, _wait_end_s(sequence, now))
            if not budget.has_room or patience <= 0 < len(blocked):
                break
            if len(blocked) > self._config.lookahead or num_biding >= self._most_biding:
                break
        self._looked_at = None if chunks else self._sight()
        return chunks

    def admit_invited(self, budget: StepBudget, now: float) -> None:
        """Give room to those whose prompt somebody else computes: they need no tokens of a step,
        so they wait for none. Whom nothing may pass they do not pass either."""
        roster = self._roster
        invited = [sequence for sequence in roster.invited.values() if sequence.receives]
        if self.is_paused or not invited:
            return
        head = next(self._candidates())
        growth = self._growth.num_blocks(roster.running())
        for sequence in invited:
            if not budget.num_places or (head is not sequence and self._patience(head) <= 0):
                break
            own = self._growth.num_blocks((sequence,))
            verdict = self._start(sequence, growth + own, now)
            if verdict is AdmissionResult.BLOCKED:
                break
            if verdict is AdmissionResult.ADMITTED:
                growth += own
                budget.spend_place()

    def _candidates(self) -> Iterator[Sequence]:
        """Who waits and may start at all, in order."""
        waiting = self._roster.waiting
        return waiting.preempted() if self.is_paused else iter(waiting)

    def _sight(self) -> tuple[object, ...]:
        """All that verdicts depend on, but the time and the ends of transfers."""
        roster = self._roster
        return (
            *self._holdings.version,
            roster.waiting.version,
            roster.num_running,
            self._growth.mean_tokens,
        )

    def _patience(self, sequence: Sequence) -> int:
        """How many more may pass a blocked sequence; a preempted one has no patience left."""
        if sequence.num_preemptions:
            return 0
        return self._config.max_passes - sequence.num_passes

    def _start(self, sequence: Sequence, num_growth: int, now: float) -> AdmissionResult:
        """Admit `sequence` if there is room for it and nothing is worth waiting for."""
        if still_follows(sequence, now):
            return AdmissionResult.FOLLOWING
        if self._loads.still_waits(sequence, now):
            return AdmissionResult.LOADING
        match = self._holdings.match(sequence)
        fits = self._fits(sequence, match, num_growth)
        if match is not None and self._loads.waits(sequence, match, fits=fits, now=now):
            return self._ride(sequence, match, now)
        match = self._holdings.renew(sequence, match)
        if match is not None and self._starts_following(sequence, match, now):
            self.num_follows += 1
            return AdmissionResult.FOLLOWING
        if not fits:
            return AdmissionResult.BLOCKED
        if not self._holdings.begin(sequence, match, now):
            return AdmissionResult.BLOCKED
        sequence.is_counted = True
        if not sequence.num_preemptions:
            sequence.usage = self._holdings.usage(sequence, match, now)
        if sequence.receives:
            self._roster.move(sequence, SequenceState.RECEIVING)
            return AdmissionResult.ADMITTED
        self._roster.move(sequence, SequenceState.PREFILL)
        if sequence.usage is not None:
            self.count(sequence, sequence.usage)
        return AdmissionResult.ADMITTED

    def _ride(self, sequence: Sequence, match: Match, now: float) -> AdmissionResult:
        """Start over a promotion that began just now, where the runner can; else wait for it."""
        promotion = self._loads.rideable
        # A step takes as long as what it rides on, and so do the tokens of all others in it.
        if promotion is None or (
            self._roster.decoding and promotion.num_blocks > _MOST_RIDDEN_BLOCKS
        ):
            return AdmissionResult.LOADING
        if not self._holdings.ride(sequence, match, promotion, now):
            return AdmissionResult.LOADING
        self._roster.move(sequence, SequenceState.PREFILL)
        return AdmissionResult.ADMITTED

    def count(self, sequence: Sequence, usage: Usage) -> None:
        """A request was admitted for the first time."""
        sequence.usage = usage
        self.num_admitted += 1
        self.prompt_tokens += usage.prompt_tokens
        self.queue_s += usage.queued_s
        self.found_tokens.update(usage.by_tier)
        if usage.miss_reason is not None:
            self.misses[usage.miss_reason] += 1
        if usage.load is not None and usage.load.choice != "none":
            self.recent_loads.append(usage.load)

    def _starts_following(self, sequence: Sequence, match: Match, now: float) -> bool:
        config = self._config
        return starts_following(
            sequence,
            match,
            self._roster.alive,
            min_blocks=config.follow_min_blocks,
            until_s=now + config.follow_timeout_s,
        )

    def _fits(self, sequence: Sequence, match: Match | None, num_growth: int) -> bool:
        found = 0 if match is None else match.device_blocks
        return admits(
            num_needed=sequence.num_blocks_wanted - found,
            num_available=self._holdings.available(match),
            num_growth=num_growth,
            num_running=self._roster.num_running,
        )


def _wait_end_s(sequence: Sequence, now: float) -> float:
    """When a sequence that does not start now stops waiting for others, if that is to come."""
    ends: list[float | None] = [
        sequence.follow_until_s if sequence.leader is not None else None
    ]
    if sequence.load is not None:
        ends.append(sequence.load.end_s)
    return min((end for end in ends if end is not None and end > now), default=inf)


def _pass(blocked: list[Sequence]) -> int:
    """One more was admitted past these; how many passes that takes of their patience."""
    for sequence in blocked:
        sequence.num_passes += 1
    return 1 if blocked else 0
