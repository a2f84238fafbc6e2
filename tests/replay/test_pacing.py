"""Smooth decoding while prompts are computed, on a simulated H200."""

import json

import numpy as np
import pytest

from headwater.cache import CacheConfig, TieredCache
from headwater.clock import VirtualClock
from headwater.engine.core import EngineCore
from headwater.replay.devices import SimRunner
from headwater.replay.presets import preset
from headwater.replay.report import make_report
from headwater.replay.simulator import Simulator
from headwater.replay.slo import parse_slo
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.pacing import ADAPTIVE_ITL, ItlTarget
from headwater.scheduler.request import Request, SamplingParams
from headwater.scheduler.scheduler import Scheduler
from headwater.types import RequestId
from tests.replay.traces import make_config, make_small_trace

CLIENTS, REQUESTS, PROMPT, OUTPUT = 64, 192, 1000, 64


class ClosedLoop:
    """Clients that each send a new prompt as soon as the previous one is answered."""

    def __init__(self, step_tokens, itl=None, kind=SimRunner):
        self.clock = VirtualClock()
        cache = TieredCache(CacheConfig(device_blocks=12_000, block_tokens=64))
        config = SchedulerConfig(
            max_model_len=100_000, max_num_seqs=256, max_batched_tokens=step_tokens, itl=itl
        )
        runner = kind(preset("h200-8b").step, self.clock, {})
        self.core = EngineCore(Scheduler(config, cache), runner, self.clock)
        self.gaps_ms = []
        self._last_s = {}
        self._rng = np.random.default_rng(1)
        self._num_added = self._num_ended = self._num_tokens = 0

    def run(self):
        """Tokens per second, until every request has ended."""
        for _ in range(CLIENTS):
            self._add()
        while self._num_ended < REQUESTS:
            for output in self.core.step():
                self._take(output)
        return self._num_tokens / self.clock.now()

    def _add(self):
        tokens = self._rng.integers(0, 1 << 30, PROMPT).astype(np.int32)
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        name = RequestId(str(self._num_added))
        self.core.add(
            Request(request_id=name, tokens=tokens, params=params, arrival_s=self.clock.now())
        )
        self._num_added += 1

    def _take(self, output):
        now, name = self.clock.now(), output.request_id
        self._num_tokens += len(output.tokens)
        if name in self._last_s:
            self.gaps_ms.append(1e3 * (now - self._last_s[name]))
        self._last_s[name] = now
        if output.finish_reason is not None:
            self._num_ended += 1
            if self._num_added < REQUESTS:
                self._add()


class SlowHost(SimRunner):
    """A runner whose steps with prompts take as long as the host needs to launch them."""

    def collect(self):
        has_chunks = len(self._submitted[0].tokens) > self._submitted[0].num_rows
        before = self._clock.now()
        result = super().collect()
        if has_chunks:
            self._clock.advance(max(before + 0.032 - self._clock.now(), 0.0))
        return result


@pytest.fixture(scope="module")
def best_fixed_tokens_s():
    """The best throughput of four fixed numbers of tokens per step."""
    return max(ClosedLoop(tokens).run() for tokens in (512, 1024, 2048, 8192))


@pytest.mark.parametrize("target", [ADAPTIVE_ITL, ItlTarget(min_s=0.040)])
def test_steps_stay_within_the_target_and_lose_little_throughput(target, best_fixed_tokens_s):
    """A step has room for 8,192 tokens, which take 190 ms; the target bounds it."""
    load = ClosedLoop(8192, target)
    tokens_s = load.run()

    assert np.percentile(load.gaps_ms, 99) <= 40
    assert tokens_s >= 0.95 * best_fixed_tokens_s
    load.core.check()


def test_steps_that_the_host_bounds_do_not_get_ever_fewer_prompt_tokens():
    """Launching takes longer than the target: fewer tokens would not make such a step shorter."""
    slow = ClosedLoop(8192, ADAPTIVE_ITL, SlowHost)

    assert slow.run() >= 0.8 * ClosedLoop(1024, None, SlowHost).run()
    assert np.percentile(slow.gaps_ms, 99) <= 36


def test_a_fixed_budget_alone_makes_tokens_late():
    """Without a target, long prompts make decode steps longer than the target."""
    load = ClosedLoop(8192)
    load.run()

    assert np.percentile(load.gaps_ms, 99) > 150


@pytest.mark.parametrize("every_s", [0.005, 0.03])
def test_steps_taken_at_once_measure_what_steps_one_by_one_measure(every_s):
    """The whole report is equal, bit for bit, with a target that bounds most steps."""
    requests = make_small_trace(60, seed=2, every_s=every_s)
    reports = []
    for fast_forward in (True, False):
        config = make_config(max_itl_ms=4.0, fast_forward=fast_forward)
        reports.append(
            json.dumps(make_report(Simulator(config, requests).run(), parse_slo("")))
        )

    assert reports[0] == reports[1]
