"""Decides what the next step computes, and applies the results of the last one.

Pure: no I/O, no threads, no clock. Decodes come first. Prefills and waiting sequences share the
step's other tokens: waiting ones are admitted while the step has tokens and the pool has
blocks. `pacing` decides how many tokens a step has, and which prefill is next. `schedule`
returns a step and `advance` applies its result; one more step may be scheduled in between. The
cost of a step grows with the number of sequences, never with the number of blocks.
"""

from collections import deque
from math import inf

from headwater.cache import JobEffect, JobOutcome, Lookup, OffloadJob, TieredCache, TransferJob
from headwater.errors import InvariantError
from headwater.scheduler.admission import Admission
from headwater.scheduler.audit import audit
from headwater.scheduler.batch import (
    Chunk,
    InFlightStep,
    ScheduledBatch,
    StepBudget,
    StepResult,
    build_batch,
)
from headwater.scheduler.blocks import BlockAllocator, GrowthEstimate
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.decode_rows import NO_ROWS, RowStep
from headwater.scheduler.fast_forward import DecodeOnly, decode_only_steps, fast_forward
from headwater.scheduler.load_state import ANSWER_S, MeasuredRates
from headwater.scheduler.loading import KVLoader
from headwater.scheduler.offload import OffloadPlanner, Prefetch
from headwater.scheduler.pacing import StepCosts, in_prefill_order
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.remote import Handoffs
from headwater.scheduler.request import Request, SequenceOutput
from headwater.scheduler.results import Preemption, ResultApplier, StepOutputs
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.stats import (
    SchedulerStats,
    SequenceView,
    Totals,
    snapshot,
    view_sequences,
)
from headwater.types import RequestId, Tokens

_DECODE = SequenceState.DECODE  # read for each row; a member of an enum takes longer to read


class Scheduler:
    """Owns every sequence from its arrival to its end.

    Invariants, verified by `check()`: a waiting sequence has no slots and no lease; a running
    one has slots for every token it was scheduled to compute; each held slot belongs to one
    sequence; slots are freed only when no step in flight can still write to them.
    """

    def __init__(self, config: SchedulerConfig, cache: TieredCache) -> None:
        self.config, self.cache = config, cache
        self._block_tokens = cache.block_tokens
        pool_tokens = cache.config.device_blocks * cache.block_tokens
        self.max_model_len = min(config.max_model_len, pool_tokens + 1)
        """Maximum number of tokens of one sequence. All except the last one must fit; the last
        one is never computed."""
        self._has_lower_tiers = cache.config.host_blocks > 0
        self._totals = Totals()
        self._table = SequenceTable()
        self._blocks = BlockAllocator(cache, prefix_caching=config.prefix_caching)
        self._growth = GrowthEstimate(cache.block_tokens, config.expected_output_tokens)
        self._preemption = Preemption(
            self._table, self._blocks, self._growth, self._totals, save=config.save_preempted
        )
        self._loader = KVLoader(config, cache)
        self._offloads = OffloadPlanner(cache, config)
        self._prefetch = Prefetch(config, cache, self._table, self._growth, self._loader)
        self._admission = Admission(
            config, self._table, self._blocks, self._growth, self._loader, self._totals
        )
        self._results = ResultApplier(
            self._table, self._blocks, self._growth, self._totals, self._preemption, cache
        )
        self.handoffs = Handoffs(
            self._table,
            self._blocks,
            self._totals,
            self._results.apply_token,
            self._results.finish,
            self._reschedule,
        )
        self._loader.finish_overlapped = self._finish_overlapped
        self._writes: list[OffloadJob] = []
        """Offloads that are planned and not taken by the loop yet."""
        self._is_stalled = self._was_idle = False
        """`_is_stalled`: nothing can be scheduled before a transfer ends or a wait times out.
        `_was_idle`: the last call of `schedule` found nothing to compute, with no step in
        flight."""
        self._recheck_s = inf
        """Earliest timeout of a wait of the sequences that the last pass over the queue
        reached. Waits of other sequences do not wake the loop, because the next pass would not
        reach them either."""
        self._costs = StepCosts()
        self._in_flight: deque[InFlightStep] = deque()
        self._outputs: list[SequenceOutput] = []
        """Outputs of sequences that ended outside a step."""

    @property
    def num_in_flight(self) -> int:
        """Steps that are scheduled and not collected."""
        return len(self._in_flight)

    @property
    def num_steps(self) -> int:
        """Steps that were scheduled since the start."""
        return self._totals.num_steps

    @property
    def num_copies(self) -> int:
        """Transfers and lookups that are planned and have not ended."""
        return self.cache.num_jobs + self._loader.num_questions

    @property
    def has_waiting(self) -> bool:
        """Whether a sequence waits that is allowed to start, even if it only waits for a
        transfer."""
        return self._admission.has_candidates

    @property
    def has_work(self) -> bool:
        """Whether another turn of the engine loop would do something."""
        if self._in_flight or self._outputs or self._table.num_computing:
            return True
        if self._writes or self._loader.has_plans or self.handoffs.outputs:
            return True
        return self._admission.has_candidates and not self._is_stalled

    @property
    def wake_s(self) -> float | None:
        """When an idle or stalled scheduler has work, if no transfer ends before."""
        prefetch_s = None if self._admission.is_draining else self._prefetch.wake_s
        recheck_s = self._recheck_s if self._is_stalled else inf
        earliest = recheck_s if prefetch_s is None else min(prefetch_s, recheck_s)
        return None if earliest == inf else earliest

    def add(self, request: Request) -> Sequence:
        """Queue `request`, or raise RequestError if it can never be served."""
        is_idle = self._is_stalled or not self._table.alive
        sequence = self._table.add(request, self.config, self._block_tokens, self.max_model_len)
        sequence.entered_at = self._totals.scheduled_prompt_tokens
        # Lookups of new sequences would prevent an engine under load from ever becoming idle.
        may_ask = self._has_lower_tiers and not self._admission.is_draining
        awaits_storage = may_ask and self._loader.enter(sequence)
        self._is_stalled = awaits_storage and is_idle
        return sequence

    def abort(self, request_id: RequestId, *, now: float) -> None:
        """End a request in any state, with a last output. Unknown requests are ignored."""
        sequence = self._table.alive.get(request_id)
        if sequence is None:
            return
        self._outputs.append(SequenceOutput(request_id, [], [], finish_reason="abort"))
        self._results.finish(sequence, "abort", now)

    def pause(self) -> None:
        """Stop admitting new sequences. Running sequences continue, and preempted ones may
        still resume."""
        self._admission.is_paused = True

    def resume(self) -> None:
        """Admit new sequences again."""
        self._admission.is_paused = False
        self._reschedule()

    def begin_drain(self) -> None:
        """Stop admitting new sequences, whether paused or not, until `end_drain`."""
        self._admission.is_draining = True

    def end_drain(self) -> None:
        """Admit again, unless paused."""
        self._admission.is_draining = False
        self._reschedule()

    @property
    def num_preempted(self) -> int:
        """Sequences that were preempted and wait to resume."""
        return self._table.waiting.num_preempted

    @property
    def is_drained(self) -> bool:
        """Whether every sequence that started has finished, and nothing is in flight."""
        table = self._table
        return not (
            table.num_running
            or table.departing
            or table.waiting.num_preempted
            or self._in_flight
            or self._outputs
            or self.handoffs.outputs
            or self.handoffs.quarantined
            or self.num_copies
        )

    def allow_overlap(self) -> None:
        """Let a first chunk start before its load is done: the runner waits for loads layer by
        layer."""
        self._loader.layerwise = True

    def learn(self, rates: MeasuredRates) -> None:
        """Use these measured rates to decide between loading and recomputing."""
        self._loader.rates = rates
        self._offloads.limit_to(rates.offload_blocks_s)

    def learn_costs(self, costs: StepCosts) -> None:
        """Use these measured costs to choose how many prompt tokens a step computes."""
        self._costs = self._loader.forecasts.costs = costs

    def finish_job(self, outcome: JobOutcome, *, now: float) -> None:
        """A job ended: the cache applies the outcome and tells the owner of the job."""
        if self.cache.finish_job(outcome, now=now) is not JobEffect.DEFERRED:
            self._reschedule()

    def take_copies(self, now: float) -> list[TransferJob | Lookup]:
        """Transfers and lookups to start now; each is returned once."""
        if not self._has_lower_tiers:
            return []
        writes, self._writes = self._writes, []
        if self._loader.num_questions:
            self._recheck_s = min(self._recheck_s, now + ANSWER_S)
        return [*self._loader.take_plans(now), *writes]

    def schedule(self, *, now: float) -> ScheduledBatch | None:
        """The next step, or None when nothing can be computed now."""
        if len(self._in_flight) > 1:
            raise InvariantError("two steps are in flight already; collect one first")
        if self._is_stalled and self._loader.has_plans:
            return None  # the transfers that sequences wait for are not started yet
        singles = self._table.single_decodes()
        is_grown = self._grow_decodes(singles, now)
        table = self._table
        rows = table.rows.ready() if table.rows.sequences else NO_ROWS
        singles = [
            s
            for s in singles
            if s.num_scheduled < s.schedulable_end and not s.is_held and s.state is _DECODE
        ]
        budget = self._budget(len(rows.sequences) + len(singles))
        prefilling = in_prefill_order(table.prefilling, self._totals.scheduled_prompt_tokens)
        chunks: list[Chunk] = []
        self._recheck_s = inf
        if is_grown and self._admission.has_candidates and budget.has_room:
            # New sequences come first, within what prefills leave them: a long prompt takes
            # many steps.
            held = budget.hold_for_prefills(
                sum(s.num_tokens - s.num_scheduled for s in prefilling)
            )
            if budget.has_tokens:
                if self._has_lower_tiers:
                    # Writes that have ended made room for further ones.
                    self._writes += self._offloads.plan(self._table.waiting, now)
                chunks = self._admission.admit(budget, now)
                self._recheck_s = self._admission.recheck_s
            budget.release(held)
        chunks = [budget.spend_chunk(s) for s in prefilling if budget.has_tokens] + chunks
        if is_grown and not budget.has_tokens and table.invited:
            self._admission.admit_invited(budget, now)
        if not is_grown:
            self._plan_background(now)  # blocks of preempted sequences, before they are evicted
        if not rows.sequences and not singles and not chunks:
            idle = not table.num_computing and not self._in_flight
            # A lost copy may never end. If only such copies are in flight, retry once: this
            # turn may have freed blocks.
            awaited = self._loader.awaits_end or self.handoffs.holds_back
            self._is_stalled = idle and (awaited or (self.num_copies > 0 and self._was_idle))
            self._was_idle = idle
            return None
        return self._start_step(rows, singles, chunks)

    def advance(self, result: StepResult | None, *, now: float) -> StepOutputs:
        """Apply `result`, the result of the oldest step in flight, and return the outputs.
        `result` is None if no step was collected.

        Blocks are committed here, because the step that filled them is done. A postponed commit
        may also follow when its sequence ends or is preempted. Blocks that a peer filled are
        committed by `handoffs` when they have arrived.
        """
        outputs, self._outputs = StepOutputs(self._outputs + self.handoffs.outputs), []
        self.handoffs.outputs.clear()
        if result is not None:
            self._results.apply(self._in_flight.popleft(), result, outputs, now)
        self._plan_background(now)
        return outputs

    def decode_only_steps(self) -> DecodeOnly:
        """How many of the next steps would decode the same rows and decide nothing, provided
        that no request arrives and no transfer ends meanwhile."""
        if self._in_flight or self._outputs or self.handoffs.outputs:
            return DecodeOnly(0)
        if self._writes or self._loader.has_plans:
            return DecodeOnly(0)
        return decode_only_steps(self._table, self._admission, self.config)

    def fast_forward(self, tokens: Tokens) -> None:
        """Apply `decode_only_steps` at once; `tokens` has one row per step."""
        fast_forward(self._table.decoding, tokens)
        self._totals.num_steps += len(tokens)
        self._totals.generated_tokens += tokens.size
        self._growth.lower_caution(len(tokens))

    def stats(self) -> SchedulerStats:
        """A snapshot of all counts. O(1)."""
        return snapshot(
            self._totals,
            self._table,
            self._loader,
            self._growth,
            is_paused=self._admission.is_paused,
            num_steps_in_flight=len(self._in_flight),
            num_copies=self.num_copies,
        )

    def view(self, *, max_sequences: int, now: float) -> list[SequenceView]:
        """The state of at most `max_sequences` sequences, running ones first."""
        return view_sequences(self._table, max_sequences=max_sequences, now=now)

    def check(self) -> None:
        """Raise InvariantError if an invariant is broken. Slow."""
        audit(self._table, self._in_flight, self._block_tokens)
        self._blocks.check(self._table.with_slots(), self.handoffs.quarantined.values())

    def _budget(self, num_decodes: int) -> StepBudget:
        """What the next step may compute in addition to its decodes, which wait for the whole
        step."""
        config, cost, short_tokens = self.config, inf, inf
        if num_decodes and config.itl is not None:
            cost = config.itl.chunk_tokens(self._costs)
            if not self._table.prefilling:
                short_tokens = config.itl.short_tokens(self._costs)
        return StepBudget(
            num_tokens=config.max_batched_tokens - num_decodes,
            num_places=config.max_num_seqs - self._table.num_running,
            max_chunk=config.long_prefill_tokens,
            cost=cost,
            short_tokens=short_tokens,
        )

    def _grow_decodes(self, singles: list[Sequence], now: float) -> bool:
        """Give each decoding sequence the block it needs next, preempting others if necessary.

        False when a sequence got no block in this step, or was preempted: then no sequence is
        admitted, because it would take blocks that running ones need.
        """
        rows = self._table.rows
        in_need = rows.in_need() if rows.sequences else []
        in_need += [s for s in singles if s.schedulable_end <= s.num_scheduled < s.max_computed]
        if not in_need or self._blocks.grow(in_need, now):
            return True
        self._preemption.make_room(in_need, now)
        return False

    def _start_step(
        self, rows: RowStep, singles: list[Sequence], chunks: list[Chunk]
    ) -> ScheduledBatch:
        """Build the batch, and record what it will have computed."""
        step, self._was_idle = self._totals.num_steps, False
        batch = build_batch(step, rows, singles, chunks, carries=bool(self._in_flight))
        in_flight = InFlightStep(step, rows, singles, chunks, [c.is_last for c in chunks])
        if rows.sequences:
            self._table.rows.begin(rows)
        for row, sequence in enumerate(singles, len(rows.sequences)):
            sequence.schedule(1, row)
        for row, (sequence, num_tokens) in enumerate(chunks, in_flight.num_decodes):
            sequence.schedule(num_tokens, row)
            self._totals.scheduled_prompt_tokens += num_tokens
            if sequence.overlap is not None:
                self._results.overlaps.begin(sequence)
            elif sequence.num_scheduled == sequence.num_tokens:
                self._table.move(sequence, SequenceState.DECODE)
        self._in_flight.append(in_flight)
        self._totals.num_steps += 1
        self._growth.lower_caution()
        return batch

    def _finish_overlapped(self, sequence: Sequence, outcome: JobOutcome, now: float) -> None:
        self._outputs += self._results.overlaps.finish(sequence, outcome, now)
        self._reschedule()

    def _plan_background(self, now: float) -> None:
        """Plan copies that no sequence waits for; prefetches are handed to the loader."""
        if not self._has_lower_tiers:
            return
        if self._admission.is_draining and not self._table.num_running:
            return
        if not self._admission.is_draining:
            self._prefetch.plan(now)
        self._writes += self._offloads.plan(self._table.waiting, now)

    def _reschedule(self) -> None:
        """Look at the waiting queue again: a sequence may start that could not before."""
        self._admission.look_again()
        self._is_stalled = self._was_idle = False
