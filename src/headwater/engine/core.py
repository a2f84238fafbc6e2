"""The engine loop: joins the scheduler that decides, the runner that computes and the mover
that copies.

Nothing here decides, computes or waits for anything but the runner. One thread owns a core;
whoever stands in front of it hands over requests and aborts between two turns of the loop,
and sleeps on `completions` when there is no work.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from headwater.cache import Namespace
from headwater.cache.outline import outline
from headwater.clock import Clock
from headwater.disagg.handoff.controller import HandoffController
from headwater.engine.client import (
    MEMORY,
    Answer,
    CloseSession,
    ControlCall,
    EngineInfo,
    GetStats,
    GetView,
    Pause,
    ReloadWeights,
    ResetCache,
    ResetReport,
    Resume,
)
from headwater.engine.output import EngineStats, SequenceOutput, engine_stats
from headwater.engine.pace import RateEstimator
from headwater.engine.reset import Resets, Then
from headwater.errors import ConfigError, ModelError, RequestError, StorageError
from headwater.events import CacheEvent
from headwater.metrics.view import EngineView, ViewLimits
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.request import Request
from headwater.scheduler.scheduler import Scheduler
from headwater.transfer.completions import CompletionQueue
from headwater.transfer.mover import Mover
from headwater.types import RequestId

_RELOAD_DRAIN_S = 5.0
"""Longest wait for copies in flight before weights are read."""


class Runner(Protocol):
    """Computes batches in the order they were submitted. Called from the loop's thread only.

    An implementation writes the KV of a batch's tokens to the slots of its block tables before
    any later batch reads them, and honours `carry`. What it raises ends the engine.
    """

    depth: int
    """Steps that may be in flight: 1, or 2 to decide on one while another is computed."""

    layerwise: bool
    """Whether it honours `awaits`: computes layer l of a row that reads a promotion as soon as
    layer l of that has arrived or failed, and never waits for one that has ended. Then a first
    chunk starts together with its promotion; what came of it counts when that has landed."""

    def submit(self, batch: ScheduledBatch) -> None:
        """Begin to compute; returns without waiting for the result."""

    def collect(self) -> StepResult:
        """The result of the oldest batch submitted and not collected; waits for it."""

    def close(self) -> None:
        """Release the device. Twice is safe."""


Reload = Callable[[str | None], EngineInfo]
"""Reads weights, of a folder or of the same one again; what the engine is from now on."""


class Feed(Protocol):
    """Tells those outside who follow the cache. Called from the loop's thread; never waits."""

    @property
    def snapshot_wanted(self) -> bool:
        """Whether somebody asked for all that is cached."""

    def publish(self, facts: Sequence[CacheEvent]) -> None:
        """What changed, in order."""

    def publish_snapshot(self, facts: Sequence[CacheEvent]) -> None:
        """All that is cached, after every change that was published."""

    def close(self) -> None:
        """Nothing more will come. Twice is safe."""


class EngineCore:
    """Requests in, tokens out, one step at a time."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Clock, mover: Mover | None = None
    ) -> None:
        """Without a mover there are no tiers below the device."""
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._runner = runner
        self._clock = clock
        self._mover = mover or Mover()
        if runner.layerwise:
            scheduler.allow_overlap()
        self._resets = Resets(self._cache, self._mover)
        self._pace = RateEstimator()
        self._has_tiers = self._cache.config.host_blocks > 0
        self._decide_s = 0.0
        self._step_s = 0.0
        self._feed: Feed | None = None
        self._reload: Reload | None = None
        self._peers: HandoffController | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something; if not, `wait`, or wait for a request as well."""
        if self._scheduler.has_work:
            return True
        if not self._has_tiers and self._peers is None:
            return False
        now = self._clock.now()
        return self._mover.has_news(now) or any(end <= now for end in self._wakes())

    @property
    def completions(self) -> CompletionQueue:
        """Where finished copies arrive; its descriptor wakes whoever sleeps."""
        return self._mover.completions

    def sleep_s(self) -> float | None:
        """How long nothing is to be done if nothing arrives; None is for ever."""
        ends = self._wakes()
        return max(min(ends) - self._clock.now(), 0.0) if ends else None

    def wait(self) -> None:
        """Sleep until a copy is done or a deadline has come; for loops without other input."""
        if not self.has_work:
            self.completions.wait(self.sleep_s())

    def add(self, request: Request) -> None:
        """Take a request, or raise RequestError if it can never be served."""
        if not request.prefill:
            self._scheduler.add(request)
        elif self._peers is None:
            raise RequestError("this instance hands off to nobody: it has no peers")
        else:
            self._peers.add(request, self._clock.now())

    def abort(self, request_id: RequestId) -> None:
        """End a request, whatever its state. Unknown and finished ones are ignored."""
        now = self._clock.now()
        if self._peers is not None:
            self._peers.abort(request_id, now)
        self._scheduler.abort(request_id, now=now)

    def pause(self) -> None:
        """Admit no new request; the loop stays alive and running ones go on."""
        self._scheduler.pause()

    def resume(self) -> None:
        """Admit again."""
        self._scheduler.resume()

    def reset_cache(self, tiers: Collection[str] = MEMORY, then: Then | None = None) -> None:
        """Forget what is cached in `tiers`; `then` is told what came of it, now or some steps
        later. Running requests go on with the blocks they have."""
        self._resets.begin(tiers, then or _ignore, now=self._clock.now())

    def allow_reload(self, reload: Reload) -> None:
        """Weights may be read again, by `reload`."""
        self._reload = reload

    def reload(self, folder: str | None) -> EngineInfo:
        """Compute with other weights; what is cached is forgotten if they differ.

        Raises RequestError while anything runs, ModelError where they cannot be used; nothing
        has changed then.
        """
        if self._reload is None:
            raise RequestError("this engine reads its weights once; start another")
        if running := self._scheduler.stats().num_running:
            raise RequestError(f"{running} sequences are running; drain first")
        self.drain(_RELOAD_DRAIN_S)
        if self._scheduler.num_copies:
            raise RequestError("copies between tiers have not ended; try again")
        return self._reload(folder)

    def close_session(self, session_id: str, cache_salt: str) -> bool:
        """Nothing more of this session will come; whether it was known."""
        return self._cache.close_session(Namespace(cache_salt), session_id)

    def control(self, call: ControlCall[Any], answer: Answer) -> None:
        """Carry out `call` between two steps. `answer` is called once: at once, or some steps
        later where the call takes longer."""
        try:
            if isinstance(call, ResetCache):
                self.reset_cache(call.tiers, lambda report: answer(report, report.refusal))
            else:
                answer(self._carry_out(call), None)
        except (RequestError, ModelError, ConfigError, StorageError) as exc:
            answer(None, str(exc))

    def step(self) -> list[SequenceOutput]:
        """Turn the loop once: take in copies that are done, schedule and submit a step, collect
        one, say what came of it."""
        began = self._clock.now()
        self._land(began)
        batch = self._scheduler.schedule(now=began)
        self._start(began)
        decided = self._clock.now()
        result = self._run(batch)
        collected = self._clock.now()
        self._pace.note(batch, decided, result, collected)
        outputs = self._scheduler.advance(result, now=collected)
        if self._peers is not None:
            outputs = self._peers.step_finished(outputs, collected)
        ended = self._clock.now()
        self._decide_s += decided - began + ended - collected
        self._step_s += ended - began
        return outputs

    def drain(self, within_s: float) -> None:
        """Turn the loop until no copy is in flight, at most so long: what was written is found
        after a restart."""
        end_s = self._clock.now() + within_s
        while self._scheduler.num_copies and (left_s := end_s - self._clock.now()) > 0:
            if not self.has_work:
                sleep_s = self.sleep_s()
                self.completions.wait(left_s if sleep_s is None else min(sleep_s, left_s))
            self.step()

    def stats(self) -> EngineStats:
        """A snapshot of every owner's counts. O(1)."""
        self._learn(self._clock.now())
        return engine_stats(
            self._scheduler.stats(),
            self._cache.stats(),
            self._mover,
            decide_s=self._decide_s,
            step_s=self._step_s,
            peers=None if self._peers is None else self._peers.stats(),
        )

    def view(self, limits: ViewLimits) -> EngineView:
        """A look at everything, as much of it as `limits` allow."""
        tree = None
        if limits.max_nodes:
            tree = outline(
                self._cache.tree,
                tick=self._cache.pins.tick,
                generation=self._cache.generation,
                max_depth=limits.max_depth,
                max_nodes=limits.max_nodes,
            )
        return EngineView(
            stats=self.stats(),
            sequences=self._scheduler.view(
                max_sequences=limits.max_sequences, now=self._clock.now()
            ),
            tree=tree,
        )

    def join(self, peers: HandoffController) -> None:
        """From now on hand-offs with other instances are made; `peers` belongs to this core."""
        self._peers = peers

    def follow(self, feed: Feed) -> None:
        """From now on `feed`, which belongs to this core, is told what the cache has."""
        self._feed = feed

    def publish(self) -> None:
        """Tell whoever follows the cache what changed since the last call."""
        feed, facts = self._feed, self._cache.events
        if feed is None or facts is None:
            return
        feed.publish(facts.take())
        if feed.snapshot_wanted:
            feed.publish_snapshot(list(facts.snapshot()))

    def check(self) -> None:
        """Raise InvariantError if any book does not balance. O(everything)."""
        self._scheduler.check()
        self._cache.check()

    def close(self) -> None:
        """End the executors and release the runner's device. Twice is safe."""
        if self._feed is not None:
            self._feed.close()
        if self._peers is not None:
            self._peers.close()
        self._mover.close()
        self._runner.close()

    def _carry_out(self, call: ControlCall[Any]) -> object:
        """The reply of a call that is answered at once."""
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
            case ReloadWeights(folder):
                return self.reload(folder)
        raise RequestError(f"this engine does not support {type(call).__name__}")

    def _wakes(self) -> list[float]:
        """When something is to be done although nothing arrives."""
        peers = None if self._peers is None else self._peers.wake_s
        ends = (self._mover.wake_s, self._scheduler.wake_s, self._resets.wake_s, peers)
        return [end for end in ends if end is not None]

    def _start(self, now: float) -> None:
        """Have copies begun, and peers told who was scheduled."""
        self._mover.start(self._scheduler.take_copies(now), now=now)
        if self._peers is not None:
            self._peers.step_scheduled(now)

    def _land(self, now: float) -> None:
        """Take in what the executors report, and what they tell about their speed."""
        self._take_in(now)
        if not self._resets.is_idle:
            self._resets.advance(now)
        if self._peers is not None:
            self._peers.receive(self.completions.take_posted(), now)
            if self.completions.has_any:
                # What that led to at once, such as a fence that holds, is not a step late.
                self._take_in(now)
                self._peers.receive(self.completions.take_posted(), now)
        if self._peers is not None or (self._has_tiers and self._scheduler.has_waiting):
            self._learn(now)

    def _take_in(self, now: float) -> None:
        """Take in the ends of copies."""
        for outcome in self._mover.take(now=now):
            if self._resets.is_idle or not self._resets.lands(outcome):
                self._scheduler.finish_job(outcome, now=now)

    def _learn(self, now: float) -> None:
        """Let choices be priced by what was measured lately."""
        self._scheduler.learn(self._pace.rates(self._mover, now))

    def _run(self, batch: ScheduledBatch | None) -> StepResult | None:
        """Submit `batch`; collect the oldest step once as many are in flight as may be.

        With nothing to submit, what is in flight is collected: the scheduler waits for it.
        """
        if batch is not None:
            self._runner.submit(batch)
        in_flight = self._scheduler.num_in_flight
        if in_flight == 0 or (batch is not None and in_flight < self._runner.depth):
            return None
        return self._runner.collect()


def _ignore(report: ResetReport) -> None:
    """Of somebody who does not ask."""
