"""The offline optimum against an exhaustive search: no choice of kept blocks finds more."""

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.policy import POLICIES
from headwater.replay.cache_only import replay_cache, replay_optimum
from headwater.replay.optimum import optimal_hits
from tests.replay.traces import make_request, needs_traces, public_trace, traces
from tests.search import search


def best_of_all(paths, capacity):
    """The most hits of any way to keep at most `capacity` blocks after each request."""

    @cache
    def best(number, resident):
        if number == len(paths):
            return 0
        path = paths[number]
        found = next((i for i, block in enumerate(path) if block not in resident), len(path))
        there = sorted(resident | set(path))
        keeps = (
            frozenset(keep)
            for count in range(min(capacity, len(there)) + 1)
            for keep in combinations(there, count)
        )
        return found + max(best(number + 1, keep) for keep in keeps)

    return best(0, frozenset())


@search(examples=60)
@given(requests=traces(max_blocks=5, max_requests=5), capacity=st.integers(0, 4))
def test_no_choice_of_what_to_keep_finds_more(requests, capacity):
    """Belady with bypass is the best among all possible sets."""
    paths = tuple(tuple(request.hash_ids) for request in requests)

    assert sum(optimal_hits(requests, capacity)) == best_of_all(paths, capacity)


@search(examples=40)
@given(requests=traces(), capacity=st.integers(1, 10), name=st.sampled_from(sorted(POLICIES)))
def test_no_policy_finds_more_than_the_optimum(requests, capacity, name):
    """No policy is above the ceiling."""
    best = sum(optimal_hits(requests, capacity))

    assert replay_cache(requests, capacity, eviction=name).hit_blocks <= best


def test_a_cache_that_never_fills_is_optimal():
    """Without a capacity every policy finds what was ever seen."""
    requests = [make_request([1, 2]), make_request([1, 3]), make_request([1, 2, 4])]

    assert replay_optimum(requests, None).hit_blocks == 3
    assert replay_cache(requests, None).hit_blocks == 3


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "capacity", "share"),
    [
        ("conversation", 3_000, 29.45),
        ("conversation", 5_859, 35.32),
        ("synthetic", 3_000, 44.67),
        ("synthetic", 5_859, 55.00),
    ],
)
def test_ceilings_of_the_public_traces(name, capacity, share):
    """The values are those of an independent study."""
    replayed = replay_optimum(public_trace(name), capacity)

    assert round(100 * replayed.block_hit, 2) == share
