"""`headwater bench ranks`: the cost of a second rank in each step.

This is the cost to pack the step, to send it to the rank, and to receive the rank's answer.

The engine loop, the scheduler and the cache are real; the model computes nothing. The second
rank is a process that unpacks each step and answers. Engines with one and with two ranks
alternate, so that both are measured under the same conditions. The goal is at most 150 µs more
per step than with one rank.
"""

import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np

from headwater.bench._flags import read_flags
from headwater.bench._report import print_report
from headwater.cache import CacheConfig, TieredCache
from headwater.clock import SystemClock
from headwater.device.parallel.channel import RankChannel, RankMessage
from headwater.device.parallel.step_message import StepPacker
from headwater.engine.collector import settle_collector
from headwater.engine.core import EngineCore
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.request import Request, SamplingParams
from headwater.scheduler.scheduler import Scheduler
from headwater.types import RequestId

_BLOCK = 64
_TURN_STEPS = 50
"""Steps of one engine before the other one continues."""


class _NullRunner:
    """Samples token 1 for every row, on this rank alone."""

    depth = 1
    layerwise = False

    def __init__(self) -> None:
        self._results: deque[StepResult] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        count = len(batch.sampled)
        tokens = np.ones(count, dtype=np.int32)
        self._results.append(
            StepResult(step=batch.step, tokens=tokens, logprobs=[None] * count)
        )

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        """Nothing to release."""


class _RankedNullRunner(_NullRunner):
    """A `_NullRunner` with a second rank: it sends each step to that rank and waits for its
    answer."""

    def __init__(self, channel: RankChannel) -> None:
        super().__init__()
        self._channel = channel
        self._packer = StepPacker()
        self.num_bytes = 0

    def submit(self, batch: ScheduledBatch) -> None:
        message = self._packer.pack(batch, batch.tokens)
        self.num_bytes = len(message)
        self._channel.send(RankMessage.STEP, message)
        super().submit(batch)

    def collect(self) -> StepResult:
        self._channel.receive()
        return super().collect()


def main(argv: list[str]) -> int:
    """Run the benchmark and print a table, or JSON."""
    options = read_flags(_parser(), argv)
    if options.quick:
        options.steps = 600
    result = {f"{count}_sequences": measure(count, options) for count in options.sequences}
    print_report("headwater bench ranks", result, as_json=options.json)
    return 0


def measure(num_sequences: int, options: Namespace) -> dict[str, float]:
    """Median microseconds of a decode step with one and with two ranks, and the difference from
    pairs of turns."""
    with ExitStack() as opened:
        ranked = _RankedNullRunner(_start_rank(opened))
        cores = {
            1: _make_core(_NullRunner(), num_sequences, options),
            2: _make_core(ranked, num_sequences, options),
        }
        for core in cores.values():
            core.step()
        settle_collector()
        times: dict[int, list[float]] = {1: [], 2: []}
        for turn in range(options.steps // _TURN_STEPS):
            for ranks in (1, 2) if turn % 2 else (2, 1):
                times[ranks].append(_turn_us(cores[ranks]))
    added = [two - one for one, two in zip(times[1], times[2], strict=True)]
    return {
        "one_rank_us": median(times[1]),
        "two_ranks_us": median(times[2]),
        "added_us": median(added),
        "message_bytes": float(ranked.num_bytes),
    }


def _turn_us(core: EngineCore) -> float:
    """Median microseconds of some steps."""
    took = []
    for _ in range(_TURN_STEPS):
        began_ns = time.perf_counter_ns()
        core.step()
        took.append(time.perf_counter_ns() - began_ns)
    return median(took) / 1e3


def _start_rank(opened: ExitStack) -> RankChannel:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater.bench._null_rank", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
    opened.callback(process.wait)
    channel = RankChannel(ours, send_timeout_s=10.0)
    opened.callback(channel.close)
    return channel


def _make_core(runner: Any, num_sequences: int, options: Namespace) -> EngineCore:  # noqa: ANN401 - either of them
    """An engine in which all sequences wait; its first step computes every prompt."""
    length = options.context + options.steps + 2
    config = SchedulerConfig(
        max_model_len=length + 1,
        max_num_seqs=num_sequences,
        max_batched_tokens=num_sequences * options.context,
    )
    blocks = num_sequences * (length // _BLOCK + 2)
    cache = TieredCache(CacheConfig(device_blocks=blocks, block_tokens=_BLOCK))
    core = EngineCore(Scheduler(config, cache), runner, SystemClock())
    random = np.random.default_rng(0)
    for number in range(num_sequences):
        core.add(
            Request(
                request_id=RequestId(f"request-{number}"),
                tokens=random.integers(0, 30_000, options.context).astype(np.int32),
                params=SamplingParams(
                    max_tokens=length - options.context, temperature=0.0, ignore_eos=True
                ),
                arrival_s=0.0,
            )
        )
    return core


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="headwater bench ranks", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        default=[1, 32, 64],
        help="sequences in each step (1 32 64)",
    )
    parser.add_argument(
        "--context", type=int, default=2048, help="context tokens of each sequence (2048)"
    )
    parser.add_argument("--steps", type=int, default=2000, help="steps of each engine (2000)")
    parser.add_argument("--quick", action="store_true", help="use fewer steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
