"""Which waiting sequences start now. `admits` is the one rule, for every caller.

A sequence may also wait for a prefix that a *running* sequence is computing (`prefix_wait`). It
holds no slots and no lease meanwhile.

Proof of progress: some sequence always finishes, whatever the pool size and the load.

1. A sequence is admitted with slots for *all* its tokens at once, the partial last block
   included. A prefill therefore never asks for another block and is never preempted. While
   there is a prefill, a step has more tokens than decodes, because `max_batched_tokens >=
   max_num_seqs`. Prefills are computed in the order of `pacing`. By that order, a prefill is
   old after finitely many tokens, and finitely many prefills come before an old one. So each
   admission leads to at least one sampled token, unless the request is aborted or its
   overlapped load failed. The number of loads per request is bounded, and then the request is
   computed without them.
2. Only decoding sequences are preempted. By 1, each has sampled a token since it was admitted,
   and a preempted sequence keeps its tokens. A request samples finitely many tokens, so it is
   preempted finitely often.
3. When no sequence runs, no block is leased or held. Blocks of transfers in flight are freed when
   those end, and each has a deadline; then the whole pool is available. A request that needs
   more than the whole pool at its longest was refused on arrival. So the head of the queue is
   admitted: that is the `num_running == 0` line below, which asks for no reserve.
4. When a sequence runs, a step computes at least one row, or waits for a step in flight that
   will finish or preempt a sequence, or preempts. By 2 it cannot preempt for ever.
5. A sequence that a peer fills is running, has slots for all its prompt, and is never preempted.
   It computes nothing here, but its lease ends by delivery or by expiry, and then 1 or 3 holds.

The reserve for growth is therefore never needed for progress. It keeps a full pool from
admitting sequences only to preempt them again.
"""

from collections.abc import Iterator
from enum import Enum, auto
from math import inf

from headwater.cache import Match
from headwater.scheduler.batch import Chunk, StepBudget
from headwater.scheduler.blocks import BlockAllocator, GrowthEstimate
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.loading import KVLoader
from headwater.scheduler.pacing import MAX_UNFINISHED, is_old, prefill_place, prompt_place
from headwater.scheduler.prefix_wait import (
    lend_place,
    starts_prefix_wait,
    still_waits_for_prefix,
)
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.stats import Totals


class _AdmissionResult(Enum):
    """The result of trying to start one waiting sequence."""

    ADMITTED = auto()
    BLOCKED = auto()
    """There is no room for it now. A bounded number of later sequences may start before it."""

    HELD = auto()
    """Enough long prompts are being computed. Shorter prompts may start before this one until
    it is old; see `pacing`."""

    NEXT = auto()
    """A later step starts it and those behind it: it would make this step much longer."""

    LOADING = auto()
    """It waits for blocks that are being loaded from a lower tier."""

    AWAITING_PREFIX = auto()
    """It waits for blocks that a running sequence is computing."""


def admits(*, num_needed: int, num_available: int, num_growth: int, num_running: int) -> bool:
    """Whether `num_needed` blocks may be taken now.

    `num_needed` are the blocks to be held: all that the sequence's tokens fill, less the cached
    ones. `num_available` are the blocks that could be taken, without the cached ones, which are
    about to be leased. `num_growth` is what the running sequences and this one are expected to
    need later.
    """
    if num_running == 0:
        return num_needed <= num_available
    return num_needed + num_growth <= num_available


_WAITERS_PER_PLACE = 4
"""For each sequence that may run, one step skips at most this many sequences that wait for a
load or a prefix."""

_MAX_HELD = 32
"""Maximum number of long prompts that one step skips."""

_NEAR_SHARE = 2
"""Cached blocks are kept for the first sequences of the queue, which together need at most one
device block in this many. Otherwise these blocks would evict each other."""

_NEAR_LOOKS = 16
"""The first n sequences are determined again after n / `_NEAR_LOOKS` changes of the queue."""

_MAX_OVERLAPPED_BLOCKS = 16
"""Largest load that a step with decodes may wait for: two or three milliseconds on a GPU."""


class Admission:
    """Goes through the waiting queue in order and starts what `admits` allows."""

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
        self._max_waiters = _WAITERS_PER_PLACE * config.max_num_seqs
        self._last_inputs: tuple[object, ...] | None = None
        """The inputs of the last `admit` that started no sequence; None otherwise."""
        self._near_blocks = blocks.num_cacheable // _NEAR_SHARE
        self._near_version, self._num_near = 0, 0
        """At the last `_keep_found`: version of the queue, and number of sequences examined."""
        self.recheck_s = inf
        """When a wait times out, so that `admit` may decide differently with the same inputs."""
        self.is_paused = False
        """Whether only preempted sequences may start, because an operator paused the engine."""
        self.is_draining = False
        """Whether only preempted sequences may start, because the engine is being drained."""

    @property
    def has_candidates(self) -> bool:
        """Whether a waiting sequence exists that is allowed to start."""
        waiting = self._table.waiting
        return (waiting.num_preempted if self.is_closed else len(waiting)) > 0

    @property
    def is_closed(self) -> bool:
        """Whether no new sequence may start."""
        return self.is_paused or self.is_draining

    @property
    def is_futile(self) -> bool:
        """Whether `admit`, called again before `recheck_s`, would start nothing: it started
        nothing last time, and its inputs are the same."""
        return self._last_inputs == self._inputs() and self._growth.is_steady

    def look_again(self) -> None:
        """Note a change that `_inputs` does not contain, so that `admit` runs again."""
        self._last_inputs = None

    def admit(self, budget: StepBudget, now: float) -> list[Chunk]:
        """Start waiting sequences while the step has room, and return their first chunks.

        A blocked sequence is skipped, unless it was skipped too often or was preempted: nothing
        starts before such a sequence. The number of sequences examined does not grow with the
        length of the queue.
        """
        growth = self._growth.num_blocks(self._table.running())
        num_left = self._tell_loader(budget)
        chunks: list[Chunk] = []
        blocked: list[Sequence] = []
        patience, num_waiters, num_held = self._config.max_passes, 0, 0
        self.recheck_s = inf
        for prefill in self._table.prefilling:
            prefill.waiter_place = None
        for sequence in self._candidates():
            own = self._growth.num_blocks((sequence,))
            result = self._start(sequence, growth + own, now, budget)
            if result is _AdmissionResult.ADMITTED:
                growth += own
                num_left -= 1
                budget.spend_place()
                if sequence.state is SequenceState.PREFILL:
                    chunks.append(budget.spend_chunk(sequence))
                patience -= _count_passes(blocked)
            elif result in (_AdmissionResult.HELD, _AdmissionResult.NEXT):
                num_held += 1
            elif result is _AdmissionResult.BLOCKED:
                blocked.append(sequence)
                patience = min(patience, self._patience(sequence))
            else:
                num_waiters, num_left = num_waiters + 1, num_left - 1
                if result is _AdmissionResult.AWAITING_PREFIX:
                    clock = self._totals.scheduled_prompt_tokens
                    lend_place(sequence, self._blocks.block_tokens, clock)
            if result is not _AdmissionResult.ADMITTED:
                self.recheck_s = min(self.recheck_s, _wait_end_s(sequence, now))
            is_full = not budget.has_room or result is _AdmissionResult.NEXT
            if is_full or patience <= 0 < len(blocked):
                break
            if len(blocked) > self._config.lookahead or num_waiters >= self._max_waiters:
                break
            if num_held >= _MAX_HELD:
                break
        self._keep_found(num_left, now)
        self._last_inputs = None if chunks else self._inputs()
        return chunks

    def admit_invited(self, budget: StepBudget, now: float) -> None:
        """Give blocks to sequences whose prompt another instance computes. They need no tokens
        of a step, so a step without tokens left does not delay them. None of them starts before
        a sequence that no other sequence may pass."""
        table = self._table
        invited = [sequence for sequence in table.invited.values() if sequence.receives]
        if self.is_closed or not invited:
            return
        head = next(self._candidates())
        growth = self._growth.num_blocks(table.running())
        for sequence in invited:
            if not budget.num_places or (head is not sequence and self._patience(head) <= 0):
                break
            own = self._growth.num_blocks((sequence,))
            result = self._start(sequence, growth + own, now)
            if result is _AdmissionResult.BLOCKED:
                break
            if result is _AdmissionResult.ADMITTED:
                growth += own
                budget.spend_place()

    def _tell_loader(self, step: StepBudget) -> int:
        """Tell the loader how much other work there is; return how many sequences wait."""
        loader, table, num_waiting = self._loader, self._table, len(self._table.waiting)
        loader.num_waiting = max(num_waiting - 1, 0)
        loader.backlog_tokens = sum(s.num_tokens - s.num_scheduled for s in table.prefilling)
        loader.forecasts.step, loader.forecasts.num_decodes = step, len(table.decoding)
        return num_waiting

    def _keep_found(self, num_left: int, now: float) -> None:
        """Mark the cached blocks of sequences near the head of the queue as most recently used:
        under overload they would be evicted before those sequences start. A sequence with a
        load in flight is skipped, because the load keeps its blocks."""
        waiting = self._table.waiting
        num_changes = waiting.version - self._near_version
        if not num_left or num_changes * _NEAR_LOOKS < self._num_near:
            return
        self._near_version, self._num_near, room = waiting.version, 0, self._near_blocks
        for sequence in waiting:
            room -= sequence.num_blocks_wanted
            if room < 0:
                break
            self._num_near += 1
            load = sequence.load
            if not sequence.found_is_kept and (load is None or load.job is None):
                sequence.found_is_kept = True
                self._blocks.keep_found(sequence, now)

    def _candidates(self) -> Iterator[Sequence]:
        """Waiting sequences that are allowed to start, in order."""
        waiting = self._table.waiting
        return waiting.preempted() if self.is_closed else iter(waiting)

    def _inputs(self) -> tuple[object, ...]:
        """All inputs of the decisions, except the time and the outcomes of transfers."""
        table = self._table
        return (
            *self._blocks.version,
            table.waiting.version,
            table.num_running,
            self._growth.mean_tokens,
        )

    def _patience(self, sequence: Sequence) -> int:
        """How many more sequences may start before a blocked one: none before a preempted
        one."""
        if sequence.num_preemptions:
            return 0
        return self._config.max_passes - sequence.num_passes

    def _start(
        self,
        sequence: Sequence,
        num_growth: int,
        now: float,
        budget: StepBudget | None = None,
    ) -> _AdmissionResult:
        """Admit `sequence` if there is room for it and it has nothing to wait for. `budget` is
        the step that computes its first chunk; None if another instance computes the prompt."""
        if sequence.prefix_source is not None and still_waits_for_prefix(sequence, now):
            return _AdmissionResult.AWAITING_PREFIX
        load = sequence.load
        if load is not None and self._loader.still_waits(sequence, now):
            return _AdmissionResult.LOADING
        match = self._blocks.match(sequence)
        fits = self._fits(sequence, match, num_growth)
        # Without a load and without blocks below the device, there is nothing to wait for.
        if (
            match is not None
            and (load is not None or match.host_blocks or match.storage_blocks)
            and self._loader.waits(sequence, match, fits=fits, now=now)
        ):
            return self._start_overlapped(sequence, match, now)
        match = self._blocks.renew(sequence, match)
        is_shared = match is not None and sequence.scores is None
        if match is not None and is_shared and self._waits_for_prefix(sequence, match, now):
            self._totals.num_prefix_waits += 1
            return _AdmissionResult.AWAITING_PREFIX
        if not fits:
            return _AdmissionResult.BLOCKED
        if budget is not None and not sequence.receives:
            found = 0 if match is None else match.device_blocks * self._blocks.block_tokens
            deferral = self._deferral(sequence, found, budget)
            if deferral is not None:
                return deferral
        if not self._blocks.begin(sequence, match, now):
            return _AdmissionResult.BLOCKED
        sequence.is_counted = True
        if not sequence.num_preemptions:
            sequence.usage = self._blocks.usage(sequence, match, now)
        self._table.note_admitted(sequence)
        if sequence.receives:
            self._table.move(sequence, SequenceState.RECEIVING)
            return _AdmissionResult.ADMITTED
        self._table.move(sequence, SequenceState.PREFILL)
        if sequence.usage is not None:
            self._totals.count_admission(sequence.usage)
        return _AdmissionResult.ADMITTED

    def _deferral(
        self, sequence: Sequence, num_found: int, budget: StepBudget
    ) -> _AdmissionResult | None:
        """Why `sequence`, of which this many tokens are cached, starts in a later step although
        it has room; None if it starts now."""
        num_lacking = sequence.num_tokens - num_found
        if budget.postpones(num_found, num_lacking, len(self._table.waiting)):
            return _AdmissionResult.NEXT
        return _AdmissionResult.HELD if self._is_held(sequence, num_found, budget) else None

    def _is_held(self, sequence: Sequence, num_found: int, budget: StepBudget) -> bool:
        """Whether `sequence` would be one long prompt too many. A prompt that the step finishes
        is not long. A preempted sequence was admitted before and is never held."""
        prefilling = self._table.prefilling
        if len(prefilling) < MAX_UNFINISHED or sequence.num_preemptions:
            return False
        num_lacking = sequence.num_tokens - num_found
        if budget.finishes(num_found, num_lacking):
            return False
        clock = self._totals.scheduled_prompt_tokens
        # For an old prompt, only prefills computed before it count; for a young one its whole
        # class, because shorter ones that would pass it hold blocks too.
        last: tuple[int, bool, float] = sequence.rank[0], True, inf
        if is_old(sequence, num_lacking, clock):
            last = prompt_place(sequence, num_lacking, clock)
        num_before = sum(prefill_place(prefill, clock) <= last for prefill in prefilling)
        return num_before >= MAX_UNFINISHED

    def _start_overlapped(
        self, sequence: Sequence, match: Match, now: float
    ) -> _AdmissionResult:
        """Start `sequence` while its load is in flight, if the runner supports that; otherwise
        it waits for the load."""
        load = self._loader.overlappable
        # The step takes as long as the load, and all its other rows wait for it.
        if load is None or (self._table.decoding and load.num_blocks > _MAX_OVERLAPPED_BLOCKS):
            return _AdmissionResult.LOADING
        if not self._blocks.begin_overlapped(sequence, match, load, now):
            return _AdmissionResult.LOADING
        self._table.note_admitted(sequence)
        self._table.move(sequence, SequenceState.PREFILL)
        return _AdmissionResult.ADMITTED

    def _waits_for_prefix(self, sequence: Sequence, match: Match, now: float) -> bool:
        config = self._config
        return match.in_flight is not None and starts_prefix_wait(
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
    """When the wait of a sequence for a load or a prefix times out; infinite without one."""
    ends: list[float | None] = [
        sequence.prefix_wait_until_s if sequence.prefix_source is not None else None
    ]
    if sequence.load is not None:
        ends.append(sequence.load.end_s)
    return min((end for end in ends if end is not None and end > now), default=inf)


def _count_passes(blocked: list[Sequence]) -> int:
    """Count an admission before each of `blocked`; return 1, or 0 if none is blocked."""
    for sequence in blocked:
        sequence.num_passes += 1
    return 1 if blocked else 0
