"""The engine loop: joins the scheduler that decides and the runner that computes.

Nothing here decides, computes or waits for anything but the runner. One thread owns a core;
whoever stands in front of it hands over requests and aborts between two turns of the loop.
"""

from typing import Protocol

from headwater.clock import Clock
from headwater.engine.output import EngineStats, SequenceOutput, engine_stats
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.request import Request
from headwater.scheduler.scheduler import Scheduler
from headwater.types import RequestId


class Runner(Protocol):
    """Computes batches in the order they were submitted. Called from the loop's thread only.

    An implementation writes the KV of a batch's tokens to the slots of its block tables before
    any later batch reads them, and honours `carry`. What it raises ends the engine.
    """

    depth: int
    """Steps that may be in flight: 1, or 2 to decide on one while another is computed."""

    def submit(self, batch: ScheduledBatch) -> None:
        """Begin to compute; returns without waiting for the result."""

    def collect(self) -> StepResult:
        """The result of the oldest batch submitted and not collected; waits for it."""

    def close(self) -> None:
        """Release the device. Twice is safe."""


class EngineCore:
    """Requests in, tokens out, one step at a time."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._runner = runner
        self._clock = clock
        self._decide_s = 0.0
        self._step_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something; if not, wait for a request before calling it."""
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Take a request, or raise RequestError if it can never be served."""
        self._scheduler.add(request)

    def abort(self, request_id: RequestId) -> None:
        """End a request, whatever its state. Unknown and finished ones are ignored."""
        self._scheduler.abort(request_id, now=self._clock.now())

    def pause(self) -> None:
        """Admit no new request; the loop stays alive and running ones go on."""
        self._scheduler.pause()

    def resume(self) -> None:
        """Admit again."""
        self._scheduler.resume()

    def reset_cache(self) -> None:
        """Forget what is cached. Running requests go on with the blocks they have."""
        self._cache.reset()

    def step(self) -> list[SequenceOutput]:
        """Turn the loop once: schedule and submit a step, collect one, say what came of it."""
        began = self._clock.now()
        batch = self._scheduler.schedule(now=began)
        decided = self._clock.now()
        result = self._run(batch)
        collected = self._clock.now()
        outputs = self._scheduler.advance(result, now=collected)
        ended = self._clock.now()
        self._decide_s += decided - began + ended - collected
        self._step_s += ended - began
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of every owner's counts. O(1)."""
        return engine_stats(
            self._scheduler.stats(),
            self._cache.stats(),
            decide_s=self._decide_s,
            step_s=self._step_s,
        )

    def check(self) -> None:
        """Raise InvariantError if any book does not balance. O(everything)."""
        self._scheduler.check()
        self._cache.check()

    def close(self) -> None:
        """Release the runner's device. Twice is safe."""
        self._runner.close()

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
