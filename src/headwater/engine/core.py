"""The engine loop: joins the scheduler that decides, the runner that computes and the mover
that copies.

Nothing here decides, computes, or waits for anything but the runner. One thread owns a core. The
caller passes requests and aborts between two steps, and sleeps on `completions` when there is no
work.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from headwater.cache import Namespace
from headwater.clock import Clock
from headwater.disagg.handoff.controller import HandoffController
from headwater.engine.client import (
    MEMORY,
    Answer,
    CloseSession,
    ControlCall,
    GetStats,
    GetView,
    Pause,
    ReloadWeights,
    ResetCache,
    ResetReport,
    Resume,
)
from headwater.engine.feed import Feed
from headwater.engine.key_hasher import KeyHasher
from headwater.engine.maintenance import REFUSALS, Reload, Resets, Then, WeightReload
from headwater.engine.pace import RateEstimator
from headwater.engine.stats import engine_stats
from headwater.errors import EngineDead, HeadwaterError, RequestError
from headwater.metrics.stats import EngineStats
from headwater.metrics.view import EngineView, ViewLimits
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.request import Request
from headwater.scheduler.results import StepOutputs
from headwater.scheduler.scheduler import Scheduler
from headwater.transfer.mover import Mover
from headwater.types import RequestId


class Runner(Protocol):
    """Computes batches in the order in which they were submitted. Called from the loop's thread
    only.

    An implementation writes the KV of a batch's tokens to the slots of its block tables before
    any later batch reads them, and honours `carry`. An exception from it ends the engine.
    """

    depth: int
    """Steps that may be in flight: 1, or 2 to schedule one step while another is computed."""

    layerwise: bool
    """Whether it honours `awaits`: it computes layer l of a row that reads a load as soon as
    layer l of that load has arrived or failed, and never waits for a load that has ended. Then
    a first chunk starts together with its load; its result counts when the load has ended."""

    def submit(self, batch: ScheduledBatch) -> None:
        """Start computing a batch. Returns without waiting for the result."""

    def collect(self) -> StepResult:
        """Wait for the oldest batch in flight and return its result."""

    def close(self) -> None:
        """Release the device. Calling it twice is safe."""


class EngineCore:
    """Takes requests and returns tokens, one step at a time."""

    step_timeout_s = 600.0
    """Longest wait for the device. After that the engine is considered dead."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Clock, mover: Mover | None = None
    ) -> None:
        """Without a mover the engine has no tiers below the device."""
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._runner = runner
        self._clock = clock
        self._mover = mover or Mover()
        self.completions = self._mover.completions
        """Where finished transfer jobs arrive; its descriptor wakes a sleeping caller."""
        if runner.layerwise:
            scheduler.allow_overlap()
        self._resets = Resets(self._cache, self._mover)
        self._rates = RateEstimator()
        self._has_tiers = self._cache.config.host_blocks > 0
        self._decide_s = self._step_s = 0.0
        self._num_idle_turns = 0
        self.device_since: tuple[float, int] | None = None
        """The time at which the loop began to wait for the device, and the number of steps
        scheduled before; None while it does not wait. Read by the watchdog's thread."""
        self.step_tokens = 0
        self.count_compilations: Callable[[], int] | None = None
        """Counts the kernels compiled or loaded after the engine was ready; None on a CPU."""
        self._num_received = 0
        """Outcomes and messages received since the start."""
        self._feed: Feed | None = None
        self.hasher: KeyHasher | None = None
        """Hashes prompts before the loop needs the keys; None if lookups compute the keys or
        none are needed."""
        self.record_host: Callable[[], None] | None = None
        """Records the blocks that arrive on the host, for the next engine."""
        self._reload = WeightReload(scheduler)
        self._peers: HandoffController | None = None
        self.failure: str | None = None
        """Why this core cannot continue, if a part of it was lost. Read by the watchdog's
        thread."""

    def fail(self, sentence: str) -> None:
        """A part of this core is lost, such as a rank: the next step raises EngineDead. Any
        thread may call it."""
        self.failure = sentence
        self.completions.wake()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something. If not, the caller may sleep for `sleep_s`."""
        if self.failure is not None or self._scheduler.has_work or self._reload.is_ready:
            return True
        if not self._has_tiers and self._peers is None:
            return False
        now = self._clock.now()
        return self._mover.has_news(now) or any(end <= now for end in self._wakes())

    def sleep_s(self) -> float | None:
        """How long the loop may sleep if nothing arrives; None means without limit."""
        ends = self._wakes()
        return max(min(ends) - self._clock.now(), 0.0) if ends else None

    def wait(self) -> None:
        """Sleep until a transfer job ends or a deadline passes; for loops without other input."""
        if not self.has_work:
            self.completions.wait(self.sleep_s())

    def add(self, request: Request) -> None:
        """Take a request, or raise RequestError if it can never be served."""
        if not request.prefill:
            sequence = self._scheduler.add(request)
            if self.hasher is not None:
                self.hasher.hash_ahead(sequence.path())
        elif self._peers is None:
            raise RequestError(
                "the request names a prefill instance, but this instance takes no hand-offs; "
                "start it with --splitwise-role"
            )
        else:
            self._peers.add(request, self._clock.now())

    def abort(self, request_id: RequestId) -> None:
        """End a request in any state. Unknown and finished requests are ignored."""
        now = self._clock.now()
        if self._peers is not None:
            self._peers.abort(request_id, now)
        self._scheduler.abort(request_id, now=now)

    def pause(self) -> None:
        """Stop admitting new requests; running requests continue."""
        self._scheduler.pause()

    def resume(self) -> None:
        """Admit new requests again."""
        self._scheduler.resume()

    def reset_cache(self, tiers: Collection[str] = MEMORY, then: Then | None = None) -> None:
        """Remove all cached blocks of `tiers`. `then` gets the report, now or some steps later.
        Running requests keep their blocks."""
        self._resets.begin(tiers, then or (lambda report: None), now=self._clock.now())

    def allow_reload(self, reload: Reload) -> None:
        """Let `reload` read other weights while the engine runs."""
        self._reload.read = reload

    def close_session(self, session_id: str, cache_salt: str) -> bool:
        """End a session. Returns whether it was known."""
        return self._cache.close_session(Namespace(cache_salt), session_id)

    def control(self, call: ControlCall[Any], answer: Answer) -> None:
        """Execute `call` between two steps. `answer` is called once: now, or some steps later
        for a long call."""

        def refuse(error: HeadwaterError) -> None:
            answer(None, error if isinstance(error, RequestError) else RequestError(str(error)))

        try:
            match call:
                case ResetCache(tiers):
                    self.reset_cache(tiers, partial(_answer_reset, answer))
                case ReloadWeights(folder, drain_s):
                    now = self._clock.now()
                    self._reload.begin(
                        folder, drain_s, lambda info: answer(info, None), refuse, now=now
                    )
                case _:
                    answer(self._carry_out(call), None)
        except REFUSALS as exc:
            refuse(exc)

    def step(self) -> StepOutputs:
        """Run one turn: finish transfer jobs, schedule and submit a step, collect the oldest
        step, and return the outputs."""
        if self.failure is not None:
            raise EngineDead(self.failure)
        began = self._clock.now()
        received = self._num_received
        if self._has_tiers or self._peers is not None:
            self._receive(began)
        if self._reload.is_pending:
            self._reload.advance(began)
        batch = self._scheduler.schedule(now=began)
        is_idle = not self._start(began) and batch is None and received == self._num_received
        decided = self._clock.now()
        self.device_since = decided, self._scheduler.num_steps
        result = self._run(batch)
        self.device_since = None
        collected = self._clock.now()
        self.step_tokens = 0 if batch is None else len(batch.tokens)
        self._rates.note(batch, decided, result, collected)
        self._scheduler.learn_costs(self._rates.step_costs.costs)
        outputs = self._scheduler.advance(result, now=collected)
        if self._peers is not None:
            outputs = self._peers.step_finished(outputs, collected)
        self._num_idle_turns += is_idle and result is None and not outputs
        ended = self._clock.now()
        self._decide_s += decided - began + ended - collected
        self._step_s += ended - began
        return outputs

    def drain(self, within_s: float) -> None:
        """Run until no transfer is in flight, for at most `within_s`, so that blocks being
        written are found after a restart."""
        end_s = self._clock.now() + within_s
        while self._scheduler.num_copies and (left_s := end_s - self._clock.now()) > 0:
            if not self.has_work:
                sleep_s = self.sleep_s()
                self.completions.wait(left_s if sleep_s is None else min(sleep_s, left_s))
            self.step()

    def note_decode_steps(self, num_rows: int, seconds: Sequence[float]) -> None:
        """Note the time of each of several steps that were applied at once. For simulators."""
        for step_s in seconds:
            self._rates.step_costs.note_decode(num_rows, step_s)
        self._scheduler.learn_costs(self._rates.step_costs.costs)

    def stats(self) -> EngineStats:
        """A snapshot of all counts. O(1)."""
        self._learn(self._clock.now())
        stats = engine_stats(
            self._scheduler.stats(),
            self._cache.stats(),
            self._mover,
            decide_s=self._decide_s,
            step_s=self._step_s,
            num_idle_turns=self._num_idle_turns,
            peers=None if self._peers is None else self._peers.stats(),
        )
        late = 0 if self.count_compilations is None else self.count_compilations()
        predictions = {**stats.predictions, **self._rates.predictions.totals}
        return replace(stats, num_compilations=late, predictions=predictions)

    def view(self, limits: ViewLimits) -> EngineView:
        """A snapshot of sequences and prefix tree, within `limits`."""
        tree = None
        if limits.max_nodes:
            tree = self._cache.outline(max_depth=limits.max_depth, max_nodes=limits.max_nodes)
        return EngineView(
            stats=self.stats(),
            sequences=self._scheduler.view(
                max_sequences=limits.max_sequences, now=self._clock.now()
            ),
            tree=tree,
        )

    def join(self, peers: HandoffController) -> None:
        """Take part in hand-offs with other instances; `peers` belongs to this core from now on."""
        self._peers = peers

    def follow(self, feed: Feed) -> None:
        """Publish KV events to `feed`, which belongs to this core from now on."""
        self._feed = feed

    def publish(self) -> None:
        """Publish what changed in the cache since the last call."""
        if self.record_host is not None:
            self.record_host()
        feed = self._feed
        if feed is None or not self._cache.config.record_events:
            return
        feed.publish(self._cache.take_events())
        if feed.snapshot_wanted:
            feed.publish_snapshot(self._cache.snapshot_events())

    def check(self) -> None:
        """Raise InvariantError if an invariant of scheduler or cache is broken. Slow."""
        self._scheduler.check()
        self._cache.check()

    def close(self) -> None:
        """Stop the executors and release the runner's device. Calling it twice is safe."""
        for part in (self._feed, self.hasher, self._peers):
            if part is not None:
                part.close()
        self._mover.close()
        self._runner.close()

    def _carry_out(self, call: ControlCall[Any]) -> object:
        """Carry out a call that is answered at once, and return its reply."""
        match call:
            case Pause():
                self.pause()
                return None
            case Resume():
                self.resume()
                return None
            case GetStats():
                return self.stats()
            case GetView(limits):
                return self.view(limits)
            case CloseSession(session_id, cache_salt):
                return self.close_session(session_id, cache_salt)
        raise RequestError(f"this engine cannot execute {type(call).__name__}; update it")

    def _wakes(self) -> list[float]:
        """Deadlines at which there is work although nothing arrives."""
        peers = None if self._peers is None else self._peers.wake_s
        ends = (
            self._mover.wake_s,
            self._scheduler.wake_s,
            self._resets.wake_s,
            self._reload.wake_s,
            peers,
        )
        return [end for end in ends if end is not None]

    def _start(self, now: float) -> bool:
        """Start transfers and notify hand-offs. Returns whether a transfer was started."""
        copies = self._scheduler.take_copies(now)
        if copies:
            self._mover.start(copies, now=now)
        if self._peers is not None:
            self._peers.step_scheduled(now)
        return bool(copies)

    def _receive(self, now: float) -> None:
        """Finish transfer jobs, pass messages of peers on, and update the measured rates."""
        self._finish_jobs(now)
        if not self._resets.is_idle:
            self._resets.advance(now)
        if self._peers is not None:
            self._hear_peers(self._peers, now)
            if self.completions.has_any:
                # A message may complete a job at once, such as a fence that holds. It is
                # handled now, not a step later.
                self._finish_jobs(now)
                self._hear_peers(self._peers, now)
        if self._peers is not None or (self._has_tiers and self._scheduler.has_waiting):
            self._learn(now)

    def _finish_jobs(self, now: float) -> None:
        """Pass every finished transfer job to the scheduler."""
        for outcome in self._mover.take(now=now):
            self._num_received += 1
            self._scheduler.finish_job(outcome, now=now)

    def _hear_peers(self, peers: HandoffController, now: float) -> None:
        """Pass the events of peers that arrived to the hand-offs."""
        messages = self.completions.take_posted()
        self._num_received += len(messages)
        peers.receive(messages, now)

    def _learn(self, now: float) -> None:
        """Give the scheduler the rates that were measured recently."""
        self._scheduler.learn(self._rates.rates(self._mover, now))

    def _run(self, batch: ScheduledBatch | None) -> StepResult | None:
        """Submit `batch`; collect the oldest step when the runner's depth is reached.

        With nothing to submit, a step in flight is collected, because the scheduler needs its
        result to continue.
        """
        if batch is not None:
            self._runner.submit(batch)
        in_flight = self._scheduler.num_in_flight
        if in_flight == 0 or (batch is not None and in_flight < self._runner.depth):
            return None
        return self._runner.collect()


def _answer_reset(answer: Answer, report: ResetReport) -> None:
    answer(report, None if report.refusal is None else RequestError(report.refusal))
