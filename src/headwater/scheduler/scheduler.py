"""Decides what the next step computes, and takes in what the last one brought.

Pure: no I/O, no threads, no clock. Running sequences come first, decodes before prefills; then
waiting ones are admitted while the step has tokens and the pool has blocks. A step is
scheduled with `schedule`, and its result is taken in with `advance`; one more step may be
scheduled in between. The cost of a step is in sequences, never in blocks.
"""

from collections import deque

from headwater.cache import Demotion, JobOutcome, Lookup, TieredCache, TransferJob
from headwater.errors import InvariantError, RequestError
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
from headwater.scheduler.fast_forward import DecodeOnly, decode_only_steps, fast_forward
from headwater.scheduler.load_state import MeasuredRates
from headwater.scheduler.loading import KVLoader
from headwater.scheduler.offload import OffloadJobs, Prefetch
from headwater.scheduler.output import SequenceOutput, TokenLogprobs
from headwater.scheduler.overlap import OverlappedLoads
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.remote import Handoffs
from headwater.scheduler.request import Request, length_end
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.stats import (
    SchedulerStats,
    SequenceView,
    Totals,
    snapshot,
    view_sequences,
)
from headwater.types import RequestId, Tokens

# Looking up a member of an enum takes longer than comparing it; these are read for each row.
_PREEMPTING, _FINISHED = SequenceState.PREEMPTING, SequenceState.FINISHED


class Scheduler:
    """Owns every sequence from its arrival to its end.

    Invariants, verified by `check()`: a waiting sequence has no slots and no lease; a running
    one has slots for all it was given to compute; each held slot is one sequence's; slots go
    back only when no step in flight can still write to them.
    """

    def __init__(self, config: SchedulerConfig, cache: TieredCache) -> None:
        self.config = config
        self.cache = cache
        self._block_tokens = cache.block_tokens
        pool_tokens = cache.config.device_blocks * cache.block_tokens
        self.max_model_len = min(config.max_model_len, pool_tokens + 1)
        """Most tokens of one sequence. All but the last, which is never computed, must fit."""
        self._totals = Totals()
        self._table = SequenceTable()
        self._blocks = BlockAllocator(cache, prefix_caching=config.prefix_caching)
        self._growth = GrowthEstimate(cache.block_tokens, config.expected_output_tokens)
        self._loader = KVLoader(config, cache)
        self._offloads = OffloadJobs(cache, config.max_write_blocks)
        self._prefetch = Prefetch(config, cache, self._table, self._growth, self._loader)
        self._admission = Admission(
            config, self._table, self._blocks, self._growth, self._loader, self._totals
        )
        owners = (self._table, self._blocks, self._totals)
        callbacks = (self._take_in, self._finish, self._reschedule)
        self.handoffs = Handoffs(*owners, *callbacks)
        self._overlaps = OverlappedLoads(*owners, self._take_in)
        self._writes: list[Demotion] = []
        """Planned, and not handed to the loop yet."""
        self._is_stalled = False
        """Whether nothing can be done before a transfer ends, or a wait."""
        self._in_flight: deque[InFlightStep] = deque()
        self._outputs: list[SequenceOutput] = []
        """Of sequences that ended outside a step."""
        self._num_arrived = 0

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and not collected."""
        return len(self._in_flight)

    @property
    def num_copies(self) -> int:
        """Transfers and lookups that were planned and have not ended."""
        return self._loader.num_in_flight + self._offloads.num_in_flight

    @property
    def has_waiting(self) -> bool:
        """Whether a sequence waits, be it only for a transfer."""
        return self._admission.has_candidates

    @property
    def has_work(self) -> bool:
        """Whether another turn of the loop would do something."""
        if self._in_flight or self._outputs or self._table.num_computing:
            return True
        if self._writes or self._loader.has_plans or self.handoffs.outputs:
            return True
        return self._admission.has_candidates and not self._is_stalled

    @property
    def wake_s(self) -> float | None:
        """When an idle or stalled scheduler has something to do although nothing landed."""
        ends = [self._prefetch.wake_s]
        if self._is_stalled:
            ends += [self._loader.wake_s(self._table.waiting), self.handoffs.wake_s]
        return min((end for end in ends if end is not None), default=None)

    def add(self, request: Request) -> Sequence:
        """Let `request` wait, or raise RequestError if it can never be served."""
        if request.request_id in self._table.alive:
            raise RequestError(f"a request named {request.request_id!r} is running already")
        end = length_end(request, self.max_model_len)
        config, stops = self.config, request.params.stop_token_ids
        if not request.params.ignore_eos or request.params.grammar:
            stops += config.eos_token_ids
        cacheable = end if config.output_caching else len(request.tokens)
        priority = request.priority if config.policy == "priority" else 0
        sequence = Sequence(
            request,
            rank=(priority, self._num_arrived),
            block_tokens=self._block_tokens,
            num_tokens_end=end,
            max_committed=cacheable // self._block_tokens if config.prefix_caching else 0,
            stop_tokens=frozenset(stops),
        )
        self._num_arrived += 1
        is_idle = self._is_stalled or not self._table.alive
        self._table.enter(sequence)
        self._is_stalled = self._loader.enter(sequence) and is_idle
        return sequence

    def abort(self, request_id: RequestId, *, now: float) -> None:
        """End a request wherever it is; its last output says so. Unknown ones are ignored."""
        sequence = self._table.alive.get(request_id)
        if sequence is None:
            return
        self._outputs.append(SequenceOutput(request_id, [], [], finish_reason="abort"))
        self._finish(sequence, "abort", now)

    def pause(self) -> None:
        """Admit no new sequence. Running ones go on, also when they are preempted on the way."""
        self._admission.is_paused = True

    def resume(self) -> None:
        """Admit again."""
        self._admission.is_paused = False
        self._reschedule()

    def allow_overlap(self) -> None:
        """The runner waits for promotions layer by layer, so a first chunk need not."""
        self._loader.layerwise = True

    def learn(self, rates: MeasuredRates) -> None:
        """What the loop measured lately; prices are made from it."""
        self._loader.rates = rates

    def finish_job(self, outcome: JobOutcome, *, now: float) -> None:
        """A transfer or a lookup ended. Late and duplicate ends change nothing."""
        if not self._loader.finish_lookup(outcome, now=now):
            if self._overlaps.defer(outcome):
                return
            self._offloads.finish_job(outcome)
            self._prefetch.finish_job(outcome)
            self._loader.finish_job(outcome, now=now)
            self._outputs += self._overlaps.finish_job(outcome, now)
        self._reschedule()

    def take_copies(self, now: float) -> list[TransferJob | Lookup]:
        """What is to be copied and asked from now on; each plan once."""
        copies: list[TransferJob | Lookup] = [*self._loader.take_plans(now), *self._writes]
        self._writes = []
        return copies

    def schedule(self, *, now: float) -> ScheduledBatch | None:
        """The next step, or None when nothing can be computed before a step is collected."""
        if len(self._in_flight) > 1:
            raise InvariantError("two steps are in flight; collect one first")
        if self._is_stalled and self._loader.has_plans:
            return None  # what is waited for is only begun in this turn
        is_settled = self._grow_decodes(now)
        table, config = self._table, self.config
        decodes = [
            s for s in table.decoding if s.num_scheduled < s.schedulable_end and not s.is_held
        ]
        budget = StepBudget(
            num_tokens=config.max_batched_tokens - len(decodes),
            num_places=config.max_num_seqs - table.num_running,
            max_chunk=config.long_prefill_tokens,
        )
        chunks = [budget.spend_chunk(s) for s in table.prefilling if budget.num_tokens]
        if is_settled and budget.has_room and self._admission.has_candidates:
            chunks += self._admission.admit(budget, now)
        if is_settled and not budget.num_tokens and table.invited:
            self._admission.admit_invited(budget, now)
        if not is_settled:
            self._plan_background(now)  # blocks of preempted sequences, before they are evicted
        if not decodes and not chunks:
            idle = not table.num_computing and not self._in_flight
            self._is_stalled = idle and (self.num_copies > 0 or self.handoffs.holds_back)
            return None
        return self._launch(decodes, chunks)

    def advance(self, result: StepResult | None, *, now: float) -> list[SequenceOutput]:
        """Take in the oldest step in flight, if it was collected; what came of it.

        Here blocks are committed: the step that filled them is done. Those that a peer filled
        are committed by `handoffs` when they have landed, and nobody else commits any.
        """
        outputs, self._outputs = self._outputs + self.handoffs.outputs, []
        self.handoffs.outputs.clear()
        if result is not None:
            self._take_result(result, outputs, now)
        self._plan_background(now)
        return outputs

    def decode_only_steps(self) -> DecodeOnly:
        """How many steps from now on would decode the same rows and decide nothing, provided
        that nothing arrives or lands meanwhile."""
        if self._in_flight or self._outputs or self.handoffs.outputs:
            return DecodeOnly(0)
        if self._writes or self._loader.has_plans:
            return DecodeOnly(0)
        return decode_only_steps(self._table, self._admission, self.config)

    def fast_forward(self, tokens: Tokens) -> None:
        """Take in steps of a `quiet` stretch, one row of `tokens` each."""
        fast_forward(self._table.decoding, tokens)
        self._totals.num_steps += len(tokens)
        self._totals.generated_tokens += tokens.size
        self._growth.lower_caution(len(tokens))

    def stats(self) -> SchedulerStats:
        """A snapshot of every count. O(1)."""
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
        """Where sequences are; running ones first, at most `max_sequences`."""
        return view_sequences(self._table, max_sequences=max_sequences, now=now)

    def check(self) -> None:
        """Raise InvariantError if the books do not balance. O(everything)."""
        audit(self._table, self._in_flight, self._block_tokens)
        self._blocks.check(self._table.with_slots(), self.handoffs.quarantined.values())

    def _grow_decodes(self, now: float) -> bool:
        """Give each decoding sequence the block it needs next, at the cost of others if it must.

        False when one goes without in this step, or gave way: then nobody new is admitted.
        """
        needy = [
            s
            for s in self._table.decoding
            if s.schedulable_end <= s.num_scheduled < s.max_computed
        ]
        if not needy or self._blocks.grow(needy, now):
            return True
        for sequence in needy:
            while sequence.state is SequenceState.DECODE:
                if self._blocks.grow((sequence,), now):
                    break
                if self._table.gives_back:
                    return False
                self._preempt(self._table.choose_victim(), now)
        return False

    def _preempt(self, victim: Sequence, now: float) -> None:
        """Take `victim` off the batch. With a step in flight it leaves when that is collected,
        so that the token it is choosing is neither lost nor chosen twice."""
        if victim.num_in_flight:
            self._table.move(victim, SequenceState.PREEMPTING)
        else:
            self._vacate(victim, now)

    def _vacate(self, victim: Sequence, now: float) -> None:
        """Give back its blocks, all full ones committed by now, and let it wait to resume."""
        if self.config.save_preempted:
            self._blocks.save(victim)
        self._blocks.release(victim, now)
        victim.load = None
        victim.num_preemptions += 1
        victim.vacated_s = now
        self._table.move(victim, SequenceState.WAITING)
        self._totals.num_preemptions += 1
        self._growth.raise_caution()

    def _launch(self, decodes: list[Sequence], chunks: list[Chunk]) -> ScheduledBatch:
        """Make the batch, and note what it will have computed."""
        step = self._totals.num_steps
        batch = build_batch(step, decodes, chunks, carries=bool(self._in_flight))
        choosing = [chunk.is_last for chunk in chunks]
        for row, sequence in enumerate(decodes):
            sequence.give(1, row)
        for row, (sequence, num_tokens) in enumerate(chunks, len(decodes)):
            sequence.give(num_tokens, row)
            if sequence.overlap is not None:
                self._table.move(sequence, SequenceState.OVERLAPPING)
            elif sequence.num_scheduled == sequence.num_tokens:
                self._table.move(sequence, SequenceState.DECODE)
        self._in_flight.append(InFlightStep(step, decodes, chunks, choosing))
        self._totals.num_steps += 1
        self._growth.lower_caution()
        return batch

    def _take_result(
        self, result: StepResult, outputs: list[SequenceOutput], now: float
    ) -> None:
        """Note what the oldest step in flight computed and chose."""
        step = self._in_flight.popleft()
        if step.step != result.step:
            raise InvariantError(f"collected step {result.step}, expected {step.step}")
        tokens = result.tokens.tolist()
        logprobs = result.logprobs
        for sequence, token, chosen in zip(step.decodes, tokens, logprobs, strict=False):
            if sequence.state is _FINISHED:
                self._drop(sequence, 1, now)
            elif token < 0:
                failure = result.failures.get(step.decodes.index(sequence))
                outputs += self._go_without_token(sequence, 1, failure, now)
            else:
                sequence.finish_chunk_with_token(1, token)
                outputs.append(self._take_in(sequence, token, chosen, now))
        at = len(step.decodes)
        for (sequence, num_tokens), chooses in zip(step.chunks, step.choosing, strict=True):
            if sequence.state is _FINISHED:
                self._drop(sequence, num_tokens, now)
            elif sequence.overlap is not None:
                held = (tokens[at], logprobs[at]) if chooses else (None, None)
                for outcome in self._overlaps.collect(sequence, num_tokens, *held):
                    self.finish_job(outcome, now=now)
            elif chooses and tokens[at] < 0:
                failure = result.failures.get(at)
                outputs += self._go_without_token(sequence, num_tokens, failure, now)
            elif chooses:
                sequence.finish_chunk_with_token(num_tokens, tokens[at])
                self._table.note_computed(sequence)
                outputs.append(self._take_in(sequence, tokens[at], logprobs[at], now))
            else:
                sequence.finish_chunk(num_tokens)
                self._table.note_computed(sequence)
                if sequence.num_computed >= sequence.commit_at:
                    self._blocks.commit(sequence, now)
            at += chooses

    def _take_in(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float
    ) -> SequenceOutput:
        """Commit what is full, and end or vacate the sequence if it is time; its output."""
        if sequence.num_computed >= sequence.commit_at:
            self._blocks.commit(sequence, now)
        self._totals.generated_tokens += 1
        usage, sequence.usage = sequence.usage, None
        reason = stop_token = None
        if token in sequence.stop_tokens and sequence.num_tokens >= sequence.min_stop:
            reason, stop_token = "stop", token
        elif sequence.num_tokens >= sequence.num_tokens_end:
            reason = "length"
        if reason is not None:
            self._finish(sequence, reason, now)
        elif sequence.state is _PREEMPTING:
            self._vacate(sequence, now)
        return SequenceOutput(
            sequence.request_id, [token], [logprobs], reason, stop_token, usage
        )

    def _go_without_token(
        self, sequence: Sequence, num_tokens: int, failure: str | None, now: float
    ) -> list[SequenceOutput]:
        """Its mask was late: it tries again in a later step. With a `failure` it ends."""
        sequence.finish_chunk_without_token(num_tokens)
        if sequence.num_computed >= sequence.commit_at:
            self._blocks.commit(sequence, now)
        if failure is not None:
            self._finish(sequence, "failed", now)
            return [SequenceOutput(sequence.request_id, [], [], "failed", detail=failure)]
        if sequence.state is _PREEMPTING:
            self._vacate(sequence, now)
        return []

    def _drop(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """A row of a finished sequence was computed: its result is nobody's."""
        sequence.finish_chunk(num_tokens)
        overlap = sequence.overlap
        if not sequence.is_kept:
            self._table.departing.remove(sequence)
            self._blocks.release(sequence, now)
        for outcome in () if overlap is None or sequence.num_in_flight else overlap.outcomes:
            self.finish_job(outcome, now=now)

    def _finish(self, sequence: Sequence, reason: str, now: float) -> None:
        """Its slots go back now, or when nothing uses them any more."""
        self._totals.finished[reason] += 1
        if reason != "abort":
            self._growth.observe(sequence.num_output)
        self._table.move(sequence, SequenceState.FINISHED)
        if not sequence.is_kept:
            self._blocks.release(sequence, now)

    def _plan_background(self, now: float) -> None:
        """Plan copies that no sequence waits for; prefetches are handed to the loader."""
        self._prefetch.plan(now)
        self._writes += self._offloads.plan(now)

    def _reschedule(self) -> None:
        """Somebody may start who could not before."""
        self._admission.look_again()
        self._is_stalled = False
