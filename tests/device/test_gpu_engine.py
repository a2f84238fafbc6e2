"""The whole engine on a GPU in float32: the tokens of requests that are
preempted, cached or chunked equal those of a request that runs alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwater.device.model import load
from headwater.types import RequestId
from tests.device.families import assert_same_tokens
from tests.device.gpu import pytestmark, require_gpu
from tests.device.test_engine import make_core, make_workload, run

require_gpu()

from headwater.device.gpu.runner import CudaRunner  # noqa: E402 - it imports Triton

__all__ = ["pytestmark"]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_cached_chunked_and_preempted_equal_alone(
    family: Callable[[str], Path], name: str
) -> None:
    """As on a CPU, the output of each request alone and uncached equals its output when all
    requests run at once, twice, in a pool that barely holds the longest one. Greedy requests
    also give the CPU's tokens."""
    model, reference = load(family(name), device="cuda"), load(family(name))
    requests = make_workload(np.random.default_rng(3), 9)
    sizes = {"num_blocks": 16, "block_tokens": 8, "depth": 1, "caching": False}
    longest = max(len(r.tokens) + r.params.max_tokens for r in requests)
    crowded = make_core(
        model, num_blocks=-(-longest // 4) + 1, block_tokens=4, depth=2, caching=True,
        runner_class=CudaRunner,
    )  # fmt: skip

    first = run(crowded, requests)
    again = run(
        crowded, [replace(r, request_id=RequestId(r.request_id + "again")) for r in requests]
    )

    assert crowded.stats().num_preemptions > 5
    for request in requests:
        is_greedy = request.params.temperature == 0
        core = make_core(
            reference if is_greedy else model,
            runner_class=None if is_greedy else CudaRunner,
            **sizes,  # type: ignore[arg-type]  # each of its own type
        )
        tokens, gaps = run(core, [request])[request.request_id]
        if not is_greedy:
            gaps = [1.0] * len(tokens)  # chance decides, not the best two
        assert_same_tokens(first[request.request_id][0], tokens, gaps)
        assert_same_tokens(again[request.request_id + "again"][0], tokens, gaps)
