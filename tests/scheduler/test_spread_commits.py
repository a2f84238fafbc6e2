"""Commits of sequences that fill their blocks in the same step are spread over later steps."""

from itertools import pairwise

import pytest

from headwater.scheduler.request import Request
from tests.scheduler.harness import Harness, expected_tokens, make_request

COUNT = 120
PER_STEP = 2 * COUNT // 4


def make_harness(depth: int = 1) -> tuple[Harness, list[Request]]:
    """This many sequences of equal length, all decoding, with committed prompts."""
    harness = Harness(
        num_blocks=4 * COUNT,
        depth=depth,
        settings={"max_num_seqs": COUNT, "max_batched_tokens": 8 * COUNT},
    )
    requests = [
        make_request(f"r{n}", [n % 40, n // 40, 1, 2], max_tokens=10) for n in range(COUNT)
    ]
    harness.add(*requests)
    harness.steps(depth)
    return harness, requests


def num_cached(harness: Harness) -> int:
    return harness.cache.stats().device.cached


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_commits_many_times_what_fills_in_an_average_step(depth: int) -> None:
    """All sequences fill their second block in one step; these blocks are found a few steps
    later."""
    harness, requests = make_harness(depth)
    assert num_cached(harness) == COUNT, "whole blocks of prompts are committed at once"
    counts = [num_cached(harness)]
    while len(counts) < 8:
        harness.step()
        counts.append(num_cached(harness))

    grown = [after - before for before, after in pairwise(counts)]
    assert max(grown) == PER_STEP
    assert counts[-1] == 2 * COUNT
    harness.run()
    assert num_cached(harness) == 3 * COUNT
    assert all(harness.outputs[r.request_id] == expected_tokens(r) for r in requests)
    harness.check_empty()


def test_a_sequence_that_is_aborted_commits_what_is_due() -> None:
    """A client that disconnects does not lose computed blocks."""
    harness, requests = make_harness()
    while num_cached(harness) == COUNT:
        harness.step()
    assert num_cached(harness) == COUNT + PER_STEP

    for request in requests:
        harness.core.abort(request.request_id)

    assert num_cached(harness) == 2 * COUNT
    harness.step()
    harness.check_empty()
