"""Which waiting sequences start now. `admits` is the one rule, for every caller.

A sequence may also wait for a prefix that a running sequence is computing (in-flight prefix
sharing). Such a waiter holds no slots and no lease. It waits only for a *running* sequence, which
has all its slots and so always finishes the prefix, and it waits once: never for a waiting
sequence, in a circle, or beyond its deadline.

Why someone always finishes, whatever the pool and the load:

1. A sequence is admitted with slots for *all* its tokens at once, the partial last block
   included. A prefill therefore never asks for another block and is never a victim. Prefills
   are computed in the order of admission, and a step has more tokens than decodes while there
   is a prefill, because it has at least as many tokens as sequences may run. So each admission
   ends in at least one newly chosen token, unless the request is aborted or rode on a promotion
   that failed; a request starts few promotions, and computes when they are spent.
2. Only decoding sequences are preempted. By 1 each has chosen a token since it was admitted,
   and a preempted sequence keeps its tokens. A request chooses finitely many tokens, so it is
   preempted finitely often.
3. When nothing runs, no block is leased or held. Blocks of transfers in flight come back when
   those end, and each has a deadline; then the whole pool is available. A request that needs
   more than the whole pool at its longest was refused when it came. So the head is admitted:
   that is the `num_running == 0` line below, which asks for no reserve.
4. When something runs, a step computes at least one row, or waits for a step in flight that
   will end or vacate a sequence, or preempts. By 2 it cannot preempt for ever.
5. A sequence that a peer fills runs, with slots for all its prompt, and is no victim. It computes
   nothing, but its lease ends, by delivery or by its term, and then 1 or 3 holds for it.

The reserve for growth is thus never needed for progress. It is what keeps a full pool from
admitting sequences only to preempt them again.
"""

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from math import inf

from headwater.cache import Match
from headwater.scheduler.batch import Chunk, StepBudget
from headwater.scheduler.blocks import BlockAllocator, GrowthEstimate
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.loading import KVLoader
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.stats import Totals
from headwater.types import RequestId


class AdmissionResult(Enum):
    """What became of a waiting sequence that was looked at."""

    ADMITTED = auto()
    BLOCKED = auto()
    """There is no room for it now. Others may pass, a bounded number of times."""

    LOADING = auto()
    """It waits, by choice, for blocks on their way up from a lower tier."""

    AWAITING_PREFIX = auto()
    """It waits, by choice, for blocks that a running sequence is computing."""


def admits(*, num_needed: int, num_available: int, num_growth: int, num_running: int) -> bool:
    """Whether `num_needed` blocks may be taken now.

    `num_needed` are the blocks to be held: all that the sequence's tokens fill, less those
    that were found. `num_available` are the blocks that could be taken, not counting found
    ones, which are about to be leased. `num_growth` is what the running sequences and this
    one are expected to need later.
    """
    if num_running == 0:
        return num_needed <= num_available
    return num_needed + num_growth <= num_available


def still_waits_for_prefix(sequence: Sequence, now: float) -> bool:
    """Whether `sequence` has to wait on; forgets its prefix_source when it has not.

    It wakes when the blocks are committed, when the prefix_source does not run any more, and when
    the deadline has come.
    """
    prefix_source, until_s = sequence.prefix_source, sequence.prefix_wait_until_s
    if prefix_source is None or until_s is None:
        return False
    waits = (
        prefix_source.is_running and prefix_source.num_committed < sequence.prefix_wait_blocks
    )
    if not waits or now >= until_s:
        sequence.prefix_source = None
    return sequence.prefix_source is not None


def starts_prefix_wait(
    sequence: Sequence,
    match: Match,
    alive: Mapping[RequestId, Sequence],
    *,
    min_blocks: int,
    until_s: float,
) -> bool:
    """Whether `sequence` is better off waiting for what `match` found in flight; notes it.

    Not a second time, and not when it was preempted: then it has waited enough.
    """
    flight = match.in_flight
    if flight is None or flight.num_blocks < min_blocks:
        return False
    if sequence.prefix_wait_until_s is not None or sequence.num_preemptions:
        return False
    prefix_source = alive.get(flight.sequence)
    if prefix_source is None or not prefix_source.is_running:
        return False
    sequence.prefix_source = prefix_source
    sequence.prefix_wait_blocks = match.num_blocks + flight.num_blocks
    sequence.prefix_wait_until_s = until_s
    return True


_BIDING_A_PLACE = 4
"""For each sequence that may run, how many are looked past that wait for a load or a prefix_source."""

_MOST_RIDDEN_BLOCKS = 16
"""Of a promotion that a step with decodes may wait for: two or three milliseconds on a GPU."""


class Admission:
    """Goes through the queue in order and starts what `admits` lets in."""

    def __init__(
        self,
        config: SchedulerConfig,
        table: SequenceTable,
        blocks: BlockAllocator,
        growth: GrowthEstimate,
        loader: KVLoader,
        totals: Totals,
    ) -> None:
        self._config = config
        self._totals = totals
        self._table = table
        self._blocks = blocks
        self._growth = growth
        self._loader = loader
        self._most_biding = _BIDING_A_PLACE * config.max_num_seqs
        self._looked_at: tuple[object, ...] | None = None
        """What `admit` saw when it let nobody in."""
        self.recheck_s = inf
        """When it would see another thing although nothing has happened."""
        self.is_paused = False
        """Whether only preempted sequences, which are not new, may start."""

    @property
    def has_candidates(self) -> bool:
        """Whether anyone waits who may start at all."""
        waiting = self._table.waiting
        return (waiting.num_preempted if self.is_paused else len(waiting)) > 0

    @property
    def is_futile(self) -> bool:
        """Whether `admit`, called again before `recheck_s`, would change nothing: it let nobody
        in, and there is neither more room nor anybody else since."""
        return self._looked_at == self._inputs_seen() and self._growth.is_calm

    def look_again(self) -> None:
        """Something changed that `admit` has not seen."""
        self._looked_at = None

    def admit(self, budget: StepBudget, now: float) -> list[Chunk]:
        """Start waiting sequences while the step has room; their first chunks.

        A blocked one is looked past, unless it was passed too often or was preempted: nothing
        passes such a one, so it is next. How many are looked at does not grow with how many
        wait.
        """
        growth = self._growth.num_blocks(self._table.running())
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
        self._looked_at = None if chunks else self._inputs_seen()
        return chunks

    def admit_invited(self, budget: StepBudget, now: float) -> None:
        """Give room to those whose prompt somebody else computes: they need no tokens of a step,
        so they wait for none. Whom nothing may pass they do not pass either."""
        table = self._table
        invited = [sequence for sequence in table.invited.values() if sequence.receives]
        if self.is_paused or not invited:
            return
        head = next(self._candidates())
        growth = self._growth.num_blocks(table.running())
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
        waiting = self._table.waiting
        return waiting.preempted() if self.is_paused else iter(waiting)

    def _inputs_seen(self) -> tuple[object, ...]:
        """All that verdicts depend on, but the time and the ends of transfers."""
        table = self._table
        return (
            *self._blocks.version,
            table.waiting.version,
            table.num_running,
            self._growth.mean_tokens,
        )

    def _patience(self, sequence: Sequence) -> int:
        """How many more may pass a blocked sequence; a preempted one has no patience left."""
        if sequence.num_preemptions:
            return 0
        return self._config.max_passes - sequence.num_passes

    def _start(self, sequence: Sequence, num_growth: int, now: float) -> AdmissionResult:
        """Admit `sequence` if there is room for it and nothing is worth waiting for."""
        if still_waits_for_prefix(sequence, now):
            return AdmissionResult.AWAITING_PREFIX
        if self._loader.still_waits(sequence, now):
            return AdmissionResult.LOADING
        match = self._blocks.match(sequence)
        fits = self._fits(sequence, match, num_growth)
        if match is not None and self._loader.waits(sequence, match, fits=fits, now=now):
            return self._start_overlapped(sequence, match, now)
        match = self._blocks.renew(sequence, match)
        if match is not None and self._waits_for_prefix(sequence, match, now):
            self._totals.num_prefix_waits += 1
            return AdmissionResult.AWAITING_PREFIX
        if not fits:
            return AdmissionResult.BLOCKED
        if not self._blocks.begin(sequence, match, now):
            return AdmissionResult.BLOCKED
        sequence.is_counted = True
        if not sequence.num_preemptions:
            sequence.usage = self._blocks.usage(sequence, match, now)
        self._table.note_admitted(sequence)
        if sequence.receives:
            self._table.move(sequence, SequenceState.RECEIVING)
            return AdmissionResult.ADMITTED
        self._table.move(sequence, SequenceState.PREFILL)
        if sequence.usage is not None:
            self._totals.count_admission(sequence.usage)
        return AdmissionResult.ADMITTED

    def _start_overlapped(
        self, sequence: Sequence, match: Match, now: float
    ) -> AdmissionResult:
        """Start over a promotion that began just now, where the runner can; else wait for it."""
        promotion = self._loader.overlappable
        # A step takes as long as what it rides on, and so do the tokens of all others in it.
        if promotion is None or (
            self._table.decoding and promotion.num_blocks > _MOST_RIDDEN_BLOCKS
        ):
            return AdmissionResult.LOADING
        if not self._blocks.begin_overlapped(sequence, match, promotion, now):
            return AdmissionResult.LOADING
        self._table.note_admitted(sequence)
        self._table.move(sequence, SequenceState.PREFILL)
        return AdmissionResult.ADMITTED

    def _waits_for_prefix(self, sequence: Sequence, match: Match, now: float) -> bool:
        config = self._config
        return starts_prefix_wait(
            sequence,
            match,
            self._table.alive,
            min_blocks=config.prefix_wait_min_blocks,
            until_s=now + config.prefix_wait_timeout_s,
        )

    def _fits(self, sequence: Sequence, match: Match | None, num_growth: int) -> bool:
        found = 0 if match is None else match.device_blocks
        return admits(
            num_needed=sequence.num_blocks_wanted - found,
            num_available=self._blocks.available(match),
            num_growth=num_growth,
            num_running=self._table.num_running,
        )


def _wait_end_s(sequence: Sequence, now: float) -> float:
    """When a sequence that does not start now stops waiting for others, if that is to come."""
    ends: list[float | None] = [
        sequence.prefix_wait_until_s if sequence.prefix_source is not None else None
    ]
    if sequence.load is not None:
        ends.append(sequence.load.end_s)
    return min((end for end in ends if end is not None and end > now), default=inf)


def _pass(blocked: list[Sequence]) -> int:
    """One more was admitted past these; how many passes that takes of their patience."""
    for sequence in blocked:
        sequence.num_passes += 1
    return 1 if blocked else 0
