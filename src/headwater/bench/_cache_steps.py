"""The cost of one engine step in the loop: scheduling, applying the result, encoding the
outputs.

All sequences have the same length, so their blocks fill in the same step: the worst case for
commits. Times are those of the loop's thread.
"""

import time

import numpy as np

from headwater.cache import CacheConfig, TieredCache
from headwater.engine import wire
from headwater.engine.collector import settle_collector
from headwater.engine.owners import RequestOwners
from headwater.scheduler.batch import StepResult
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.request import Request, SamplingParams
from headwater.scheduler.results import StepOutputs
from headwater.scheduler.scheduler import Scheduler
from headwater.types import RequestId

_PROMPT_TOKENS = 200

_WORKERS = (1, 2, 4, 8, 16)


def measure_steps(num_sequences: int, *, block: int, num_steps: int) -> dict[str, float]:
    """Median and worst milliseconds of a step with `num_sequences` decoding sequences."""
    scheduler = _make_scheduler(num_sequences, block, _PROMPT_TOKENS + num_steps + 2)
    _step(scheduler)
    settle_collector()
    took = np.array([_step(scheduler) for _ in range(num_steps)]) * 1e3
    whole = took.sum(axis=1)
    schedule, advance, encode = np.median(took, axis=0)
    return {
        "schedule_ms": float(schedule),
        "advance_ms": float(advance),
        "encode_ms": float(encode),
        "median_ms": float(np.median(whole)),
        "worst_ms": float(whole.max()),
    }


def measure_encode(num_sequences: int, *, num_steps: int) -> dict[str, float]:
    """Median milliseconds to pack and encode a step's outputs, by the number of HTTP workers that
    share the sequences evenly."""
    request_ids = [RequestId(f"request-{number}") for number in range(num_sequences)]
    outputs = StepOutputs([])
    every = np.ones(num_sequences, dtype=np.bool_)
    outputs.add_tokens(request_ids, np.arange(num_sequences, dtype=np.int32), every)
    took: dict[int, list[float]] = {count: [] for count in _WORKERS}
    owners = {count: RequestOwners() for count in _WORKERS}
    for count, entry in owners.items():
        for number, request_id in enumerate(request_ids):
            entry.add(request_id, b"%d.0" % (number % count))
    settle_collector()
    # interleaved, so that all are measured under the same conditions
    for _ in range(num_steps):
        for count, entry in owners.items():
            begin = time.thread_time()
            entry.pack(outputs)
            took[count].append(time.thread_time() - begin)
    return {str(count): float(np.median(times)) * 1e3 for count, times in took.items()}


def _make_scheduler(num_sequences: int, block: int, length: int) -> Scheduler:
    """A scheduler in which all sequences wait; its first step computes every prompt."""
    blocks = num_sequences * (length // block + 2)
    config = SchedulerConfig(
        max_model_len=length + 1,
        max_num_seqs=num_sequences,
        max_batched_tokens=num_sequences * _PROMPT_TOKENS,
    )
    cache = TieredCache(CacheConfig(device_blocks=blocks, block_tokens=block))
    scheduler = Scheduler(config, cache)
    random = np.random.default_rng(0)
    for number in range(num_sequences):
        scheduler.add(
            Request(
                request_id=RequestId(f"request-{number}"),
                tokens=random.integers(0, 30_000, _PROMPT_TOKENS).astype(np.int32),
                params=SamplingParams(max_tokens=length - _PROMPT_TOKENS, ignore_eos=True),
                arrival_s=0.0,
            )
        )
    return scheduler


def _step(scheduler: Scheduler) -> tuple[float, float, float]:
    """Seconds to schedule a step, to apply its result, and to encode the outputs."""
    times = [time.thread_time()]
    batch = scheduler.schedule(now=0.0)
    times.append(time.thread_time())
    assert batch is not None, "every sequence decodes"
    count = len(batch.sampled)
    result = StepResult(
        step=batch.step, tokens=np.ones(count, dtype=np.int32), logprobs=[None] * count
    )
    between = time.thread_time() - times[-1]
    outputs = scheduler.advance(result, now=0.0)
    times.append(time.thread_time() - between)
    wire.encode(wire.pack_outputs(outputs))
    times.append(time.thread_time() - between)
    schedule, advance, encode = np.diff(times)
    return float(schedule), float(advance), float(encode)
