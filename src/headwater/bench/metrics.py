"""`headwater bench metrics`: the cost of metrics, compared with the time of a step.

It measures decode steps of the built-in model, the recording of the outputs of one step, and
one scrape and one dashboard request per second. Shares are relative to the time of a step.
Recording happens in the HTTP process, so it takes no time from the engine.
"""

import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headwater.bench._flags import read_flags
from headwater.bench._report import print_report
from headwater.clock import SystemClock
from headwater.config import EngineConfig
from headwater.engine.core import EngineCore
from headwater.events import BlocksCleared, BlocksStored
from headwater.launch.core import build_core
from headwater.metrics.kv_events import Pacer, encode_snapshot
from headwater.metrics.prometheus import render
from headwater.metrics.recorder import Recorder, RequestTimer
from headwater.metrics.view import ViewLimits
from headwater.scheduler.request import Request, SamplingParams
from headwater.scheduler.results import StepOutputs
from headwater.types import BlockKey, RequestId, Tier

_SCRAPE_EVERY_S = 15.0
_LOOK_EVERY_S = 1.0
_SNAPSHOT_TOKENS = 1_300_000
_LOOK = ViewLimits(max_sequences=64)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table, or JSON."""
    parser = ArgumentParser(prog="headwater bench metrics", description=__doc__)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step (32)")
    parser.add_argument("--steps", type=int, default=200, help="steps that are timed (200)")
    parser.add_argument("--quick", action="store_true", help="use few steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = read_flags(parser, argv)
    steps = 20 if options.quick else options.steps
    result = measure(options.batch, steps, repeats=50 if options.quick else 2000)
    print_report("headwater bench metrics", result, as_json=options.json)
    return 0


def measure(batch: int, steps: int, *, repeats: int) -> dict[str, Any]:
    """Microseconds of a step and of everything that observes it, and their shares."""
    core, info = build_core(EngineConfig(num_blocks_override=batch * 8, max_num_seqs=batch))
    outputs, step_us = _time_steps(core, batch, steps)
    recorder = Recorder()
    timers = [RequestTimer(recorder, SystemClock()) for _ in outputs]

    def record() -> None:
        for timer, output in zip(timers, outputs, strict=True):
            timer.record(output)

    record_us = _time(record, repeats)
    stats = core.stats()
    scrape_us = _time(lambda: render(recorder, stats, block_tokens=info.block_tokens), 50)
    snapshot_us = _time(core.stats, repeats)
    look_us = _time(lambda: core.view(_LOOK), 50)
    core.close()
    holds_ms = _snapshot_holds_ms(_SNAPSHOT_TOKENS, block_tokens=16)
    return {
        "batch": batch,
        "step_us": step_us,
        "record_us_a_step": record_us,
        "record_share_of_a_step": record_us / step_us,
        "scrape_us": scrape_us + snapshot_us,
        "scrape_share_of_time": (scrape_us + snapshot_us) / (_SCRAPE_EVERY_S * 1e6),
        "look_us": look_us,
        "look_share_of_time": look_us / (_LOOK_EVERY_S * 1e6),
        "snapshot_tokens": _SNAPSHOT_TOKENS,
        "snapshot_hold_ms_max": max(holds_ms),
        "snapshot_hold_ms_p50": float(np.median(holds_ms)),
    }


def _snapshot_holds_ms(num_tokens: int, *, block_tokens: int) -> list[float]:
    """How long the encoder of a KV event snapshot holds the interpreter lock between pauses, in
    processor time. Other threads of an engine wait that long."""
    keys = [
        BlockKey(number.to_bytes(32, "big")) for number in range(num_tokens // block_tokens)
    ]
    tokens = np.arange(num_tokens, dtype="<i4").tobytes()
    stored = BlocksStored(tier=Tier.DEVICE, keys=keys, parent=None, tokens=tokens)
    holds: list[float] = []

    class Timed(Pacer):
        def __init__(self) -> None:
            super().__init__()
            self._held_s = time.thread_time()

        def _yield(self) -> None:
            holds.append(1e3 * (time.thread_time() - self._held_s))
            super()._yield()
            self._held_s = time.thread_time()

    encode_snapshot(0.0, [BlocksCleared(), stored], block_tokens, Timed())
    return holds


def _time_steps(core: EngineCore, batch: int, steps: int) -> tuple[StepOutputs, float]:
    """The outputs of one decode step, and the microseconds of the median one."""
    for number in range(batch):
        core.add(
            Request(
                request_id=RequestId(f"r{number}"),
                tokens=np.full(65, number % 200, dtype=np.int32),
                params=SamplingParams(max_tokens=steps + 64, ignore_eos=True, temperature=0.0),
                arrival_s=0.0,
            )
        )
    outputs = StepOutputs([])
    while len(outputs) < batch:
        outputs = core.step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        outputs = core.step()
        times.append(time.perf_counter() - began)
    return outputs, float(np.median(times)) * 1e6


def _time(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of one call, from the fastest of five rounds."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        rounds.append(time.perf_counter() - began)
    return min(rounds) / repeats * 1e6
