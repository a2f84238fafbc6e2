"""An engine in this process for benchmarks of tiers."""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import process_time, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np

from headwater.clock import SystemClock
from headwater.config import EngineConfig
from headwater.engine.core import Runner
from headwater.errors import InvariantError
from headwater.launch.core import build_core
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.request import Request, SamplingParams
from headwater.types import RequestId, Tokens

if TYPE_CHECKING:
    from headwater.device.model import LoadedModel

_DRAIN_S = 120.0
_SERVE_S = 120.0


@dataclass(slots=True)
class TierRun:
    """The results of some requests that were sent together."""

    seconds: float
    first_s: float
    """Seconds until the first token of any of them."""

    cpu_s: float = 0.0
    """Processor time of the whole process, which other processes disturb least."""

    decide_us: float = 0.0
    """Microseconds of scheduling per step, over all turns of the loop."""

    decide_p50_us: float = 0.0
    """Microseconds of scheduling in the median turn that decodes and admits no prompt."""

    decide_cpu_us: float = 0.0
    """`decide_p50_us` in processor time of the loop's thread, which other processes do not
    change."""

    found: dict[str, int] = field(default_factory=dict)
    """Cached prompt tokens, by tier."""

    thread_s: dict[str, float] = field(default_factory=dict)
    """Processor time by the name of the thread; empty where the system does not tell."""


def thread_ms(runs: Sequence[TierRun]) -> dict[str, float]:
    """The median processor time of each thread, over all runs."""
    names = sorted({name for run in runs for name in run.thread_s})
    return {name: 1e3 * median(run.thread_s.get(name, 0.0) for run in runs) for name in names}


def _cpu_by_thread() -> dict[int, float]:
    """Seconds of processor time of each native thread of this process."""
    used: dict[int, float] = {}
    for thread in threading.enumerate():
        try:
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text("ascii")
        except OSError:  # the thread has ended, or the system is not Linux
            continue
        used[thread.native_id or 0] = int(text.split()[0]) / 1e9
    return used


def _used_since(before: dict[int, float]) -> dict[str, float]:
    """Processor time since `before` by the name of the thread, for threads that used any."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    used: dict[str, float] = {}
    for thread, now_s in _cpu_by_thread().items():
        if now_s > before.get(thread, 0.0):
            name = names.get(thread, "ended")
            used[name] = used.get(name, 0.0) + now_s - before.get(thread, 0.0)
    return used


class TimedRunner:
    """Passes all calls to a runner, and measures its processor time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.depth = runner.depth
        self.layerwise = runner.layerwise
        self.cpu_s = 0.0

    def submit(self, batch: ScheduledBatch) -> None:
        began = thread_time()
        self._runner.submit(batch)
        self.cpu_s += thread_time() - began

    def collect(self) -> StepResult:
        began = thread_time()
        result = self._runner.collect()
        self.cpu_s += thread_time() - began
        return result

    def close(self) -> None:
        self._runner.close()


class TierEngine:
    """A core and a clock; serves prompts of token ids to their end."""

    def __init__(
        self,
        loaded: "LoadedModel | None" = None,
        /,
        **settings: Any,  # noqa: ANN401 -- typed by EngineConfig
    ) -> None:
        """`loaded`, if given, is the model of `settings`. Engines that are compared share it:
        with weights in different memory pages, they would differ in speed."""
        self.core, self.info = build_core(EngineConfig(**settings), loaded)
        self._runner = self.core._runner = TimedRunner(self.core._runner)
        self._clock = SystemClock()
        self._numbers = itertools.count()

    def serve(self, prompts: list[Tokens], *, max_tokens: int) -> TierRun:
        """Serve all requests at once."""
        began_s, first_s = self._clock.now(), 0.0
        before, cpu_s, threads_s = self.core.stats(), process_time(), _cpu_by_thread()
        waiting, found = len(prompts), dict.fromkeys(("device", "host", "storage"), 0)
        for prompt in prompts:
            self.core.add(self._request(prompt, max_tokens))
        step_cpu_s, runner_cpu_s = 0.0, self._runner.cpu_s
        turns_s = []
        while waiting:
            if self._clock.now() - began_s > _SERVE_S:
                raise InvariantError(f"{waiting} requests did not end within {_SERVE_S:g} s")
            self.core.wait()
            began_cpu_s, decided_s = thread_time(), self.core._decide_s
            outputs = self.core.step()
            step_cpu_s += thread_time() - began_cpu_s
            if outputs:
                turns_s.append(self.core._decide_s - decided_s)
            for output in outputs:
                first_s = first_s or self._clock.now() - began_s
                waiting -= output.finish_reason is not None
                if output.usage is not None:
                    for tier in found:
                        found[tier] += output.usage.by_tier[tier]
        after = self.core.stats()
        decide_s = after.decide_s - before.decide_s
        decide_cpu_s = step_cpu_s - (self._runner.cpu_s - runner_cpu_s)
        num_steps = after.num_steps - before.num_steps
        return TierRun(
            seconds=self._clock.now() - began_s,
            first_s=first_s,
            cpu_s=process_time() - cpu_s,
            decide_us=1e6 * decide_s / num_steps,
            decide_p50_us=1e6 * median(turns_s),
            decide_cpu_us=1e6 * decide_cpu_s / num_steps,
            found=found,
            thread_s=_used_since(threads_s),
        )

    def make_prompt(self, num_tokens: int, seed: int) -> Tokens:
        """A prompt that shares no beginning with other seeds."""
        tokens = np.random.default_rng(seed).integers(5, 250, num_tokens)
        return tokens.astype(np.int32)

    def drain(self) -> None:
        """Run until all writes have ended."""
        self.core.drain(_DRAIN_S)

    def serve_in_turn(
        self, prompts: list[Tokens], *, clients: int, max_tokens: int
    ) -> tuple[list[int], list[Tokens]]:
        """Serve `clients` requests at a time; return cached tokens and output of each."""
        numbers: dict[RequestId, int] = {}
        cached = [0] * len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]
        waiting = list(range(len(prompts)))
        alive = 0
        while waiting or alive:
            while waiting and alive < clients:
                request = self._request(prompts[waiting[0]], max_tokens)
                numbers[request.request_id] = waiting.pop(0)
                self.core.add(request)
                alive += 1
            self.core.wait()
            for output in self.core.step():
                number = numbers[output.request_id]
                outputs[number] += list(output.tokens)
                alive -= output.finish_reason is not None
                if output.usage is not None:
                    cached[number] = sum(output.usage.by_tier.values())
        return cached, [np.array(tokens, dtype=np.int32) for tokens in outputs]

    def first_tokens(
        self, prompts: list[Tokens], *, clients: int, max_tokens: int
    ) -> list[float]:
        """Serve `clients` requests at a time; return the seconds to the first token of each."""
        added_s: dict[RequestId, float] = {}
        first_s: dict[RequestId, float] = {}
        waiting, alive = list(prompts), 0
        while waiting or alive:
            while waiting and alive < clients:
                request = self._request(waiting.pop(0), max_tokens)
                added_s[request.request_id] = self._clock.now()
                self.core.add(request)
                alive += 1
            self.core.wait()
            for output in self.core.step():
                if output.tokens:
                    first_s.setdefault(output.request_id, self._clock.now())
                alive -= output.finish_reason is not None
        return [first_s[number] - added_s[number] for number in added_s]

    def clear_device(self) -> None:
        """Evict every unused block from the device, and from no other tier."""
        cache = self.core._cache  # nothing in production empties one tier alone
        slots = cache.take(cache.num_available, now=self._clock.now())
        if slots is not None:
            cache.free(slots)

    def limit_storage_calls(self, timeout_s: float) -> None:
        """Limit the wait for every later storage call."""
        for link in self.core._mover._timeouts_s:  # nothing in production changes them later
            self.core._mover._timeouts_s[link] = timeout_s

    def close(self) -> None:
        """Close after the last write, so that no write reaches a folder that is being removed."""
        self.drain()
        self.core.close()

    def _request(self, prompt: Tokens, max_tokens: int) -> Request:
        return Request(
            request_id=RequestId(f"bench-{next(self._numbers)}"),
            tokens=prompt,
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            arrival_s=self._clock.now(),
        )
