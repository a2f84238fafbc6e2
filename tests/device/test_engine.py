"""The whole engine on real models: the equalities of the scheduler, with real KV."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.cache import CacheConfig, TieredCache
from headwater.clock import SystemClock
from headwater.device.model import LoadedModel, load
from headwater.device.runner import TorchRunner
from headwater.engine.core import EngineCore
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.request import Request, SamplingParams
from headwater.scheduler.scheduler import Scheduler
from headwater.types import RequestId
from tests.device.families import VOCAB, assert_same_tokens

pytestmark = pytest.mark.slow

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "min_tokens": 3,
    },
)
"""Greedy, seeded, and seeded with everything that depends on earlier output."""


def make_workload(rng: np.random.Generator, count: int) -> list[Request]:
    """Prompts of all lengths with common beginnings, continued in all ways."""
    stems = rng.integers(0, VOCAB, size=(2, 20)).astype(np.int32)
    requests = []
    for number in range(count):
        tokens = stems[number % 2, : rng.integers(1, 20)].copy()
        tokens[-1] = rng.integers(0, VOCAB)
        params = SamplingParams(
            max_tokens=int(rng.integers(20, 60)),
            seed=number,
            ignore_eos=True,
            logprobs=2,
            **WAYS[number % len(WAYS)],
        )
        request_id = RequestId(f"r{number}")
        requests.append(
            Request(request_id=request_id, tokens=tokens, params=params, arrival_s=0.0)
        )
    return requests


def make_core(
    model: LoadedModel,
    *,
    num_blocks: int,
    block_tokens: int,
    depth: int,
    caching: bool,
    runner_class: Any = None,
) -> EngineCore:
    """A `runner_class` other than `TorchRunner` has a depth of its own."""
    cache = TieredCache(CacheConfig(device_blocks=num_blocks, block_tokens=block_tokens))
    config = SchedulerConfig(
        max_model_len=128,
        max_num_seqs=6,
        max_batched_tokens=16,
        prefix_caching=caching,
        expected_output_tokens=1,
    )
    own: dict[str, Any] = {"depth": depth} if runner_class is None else {}
    runner = (runner_class or TorchRunner)(
        model,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        max_num_seqs=6,
        max_batched_tokens=16,
        **own,
    )
    return EngineCore(Scheduler(config, cache), runner, SystemClock())


def run(
    core: EngineCore, requests: Sequence[Request]
) -> dict[str, tuple[list[int], list[float]]]:
    """Run all requests at once; return the tokens of each, and for each token the lead of the
    best logit over the second."""
    outputs: dict[str, tuple[list[int], list[float]]] = {
        r.request_id: ([], []) for r in requests
    }
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            tokens, gaps = outputs[output.request_id]
            tokens += output.tokens
            for entry in output.logprobs:
                assert entry is not None, "asked for"
                gaps.append(entry.top_values[0] - entry.top_values[1])
        core.check()
    return outputs


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_cached_chunked_and_preempted_equal_alone(
    family: Callable[[str], Path], name: str, depth: int
) -> None:
    """The output of each request alone and uncached equals its output when all requests run at
    once, twice, in a pool that barely holds the longest one: greedy and seeded, with windows,
    caps and sinks."""
    model = load(family(name))
    requests = make_workload(np.random.default_rng(depth), 9)
    alone = {
        request.request_id: run(
            make_core(model, num_blocks=16, block_tokens=8, depth=1, caching=False), [request]
        )[request.request_id]
        for request in requests
    }
    longest = max(len(r.tokens) + r.params.max_tokens for r in requests)
    crowded = make_core(
        model, num_blocks=-(-longest // 4) + 1, block_tokens=4, depth=depth, caching=True
    )

    first = run(crowded, requests)
    again = run(
        crowded, [replace(r, request_id=RequestId(r.request_id + "again")) for r in requests]
    )

    stats = crowded.stats()
    assert stats.num_preemptions > 5
    assert stats.found_tokens["device"] > 0
    for request in requests:
        tokens, gaps = alone[request.request_id]
        if request.params.temperature > 0:
            gaps = [1.0] * len(tokens)  # chance decides, not the best two
        assert_same_tokens(first[request.request_id][0], tokens, gaps)
        assert_same_tokens(again[request.request_id + "again"][0], tokens, gaps)
