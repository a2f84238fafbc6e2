"""Cache-only replay: exact for an LRU on any trace; and the output of the command."""

import json
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.bench._workload import make_sessions
from headwater.cache.policy import POLICIES
from headwater.cli import main
from headwater.replay.cache_only import CacheOnly, replay_cache
from headwater.replay.optimum import optimal_hits
from headwater.replay.variants import VARIANTS
from tests.replay.traces import make_request, needs_traces, public_trace, traces
from tests.search import search

LRU_OF_PUBLIC_TRACES = [
    ("conversation", None, 36.64),
    ("conversation", 5_859, 13.61),
    ("conversation", 10_000, 21.16),
    ("synthetic", None, 63.96),
    ("synthetic", 5_859, 30.94),
    ("synthetic", 10_000, 42.39),
]


def plain_lru_hits(paths, capacity):
    """Hits of an LRU computed with a dict in order of use; within one request, the deepest
    block is the oldest."""
    resident: dict[int, None] = {}
    hits = 0
    for path in paths:
        hits += next((i for i, block in enumerate(path) if block not in resident), len(path))
        for block in reversed(path):
            resident.pop(block, None)
            resident[block] = None
        for block in list(islice(resident, max(len(resident) - capacity, 0))):
            del resident[block]
    return hits


@search(examples=150)
@given(requests=traces(), capacity=st.integers(0, 12))
def test_lru_hits_are_those_of_a_plain_computation(requests, capacity):
    """Hits are equal block for block, also if a request is longer than the cache."""
    paths = [request.hash_ids for request in requests]

    assert replay_cache(requests, capacity).hit_blocks == plain_lru_hits(paths, capacity)


@search(examples=60)
@given(requests=traces(), capacity=st.integers(0, 12), name=st.sampled_from(sorted(POLICIES)))
def test_a_cache_holds_no_more_than_its_capacity(requests, capacity, name):
    """The capacity is checked after every request and under every policy, with all
    invariants."""
    replay = CacheOnly(capacity, 12, eviction=name)
    for request in requests:
        replay.serve(request, request.whole_blocks())
        replay.cache.check()

        assert replay.cache.stats().device.cached <= capacity


def test_tokens_of_a_partial_block_are_counted_as_they_are():
    """The second request finds both blocks and all of its 768 tokens."""
    replayed = replay_cache([make_request([1, 2]), make_request([1, 2])], 10)

    assert (replayed.hit_blocks, replayed.hit_tokens) == (2, 768)
    assert (replayed.block_hit, replayed.token_hit) == (0.5, 0.5)
    assert replayed.misses_by_reason == {"never_seen": 1}


def test_the_command_prints_what_was_found(tmp_path, capsys):
    """The command prints one JSON object, for every policy and for the optimum."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}] * 2
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in (*sorted(POLICIES), "opt"):
        flags = ["--cache-only", "--capacity-blocks", "8", "--eviction", name, "--json"]
        assert main(["replay", str(trace), *flags]) == 0

        result = json.loads(capsys.readouterr().out)
        assert result["block_hit"] == result["token_hit"] == 0.5
        assert {"misses_by_reason", "wall_s"} <= set(result)


def test_an_impossible_capacity_is_refused(tmp_path, capsys):
    """There is an error message, also for flags that apply only to the cache alone."""
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}
    trace.write_text(json.dumps(row) + "\n")
    assert main(["replay", str(trace), "--cache-only", "--capacity-blocks", "-1"]) == 1
    assert "--capacity-blocks cannot be negative, got -1" in capsys.readouterr().err
    assert main(["replay", str(trace), "--capacity-blocks", "5"]) == 1
    assert "--cache-only" in capsys.readouterr().err


def test_variants_keep_requests_whole_and_in_order():
    """A variant of a trace has requests of that trace, sorted by time."""
    requests = make_sessions(300)
    known = {tuple(request.hash_ids) for request in requests}
    for name, make in VARIANTS.items():
        times = [request.arrival_s for request in make(requests)]

        assert {tuple(request.hash_ids) for request in make(requests)} <= known
        assert times == sorted(times)
        assert len(times) > 0, name
    halves = len(VARIANTS["first-half"](requests)), len(VARIANTS["second-half"](requests))
    assert sum(halves) == 300


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize(("name", "capacity", "share"), LRU_OF_PUBLIC_TRACES)
def test_lru_on_the_public_traces_is_exact(name, capacity, share):
    """The counts are those of an independent computation, and the percentages are the known
    ones."""
    requests = public_trace(name)
    paths = [request.hash_ids for request in requests]
    replayed = replay_cache(requests, capacity)

    assert round(100 * replayed.block_hit, 2) == share
    assert replayed.hit_blocks == plain_lru_hits(paths, capacity or 1 << 30)


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "capacity", "closed"),
    [
        ("conversation", 3_000, 0.25),
        ("conversation", 5_859, 0.22),
        ("synthetic", 3_000, 0.16),
        ("synthetic", 5_859, 0.20),
    ],
)
def test_session_closes_its_share_of_the_gap(name, capacity, closed):
    """The policy learns from past requests only, without initial weights."""
    requests = public_trace(name)
    lru = replay_cache(requests, capacity).hit_blocks
    session = replay_cache(requests, capacity, eviction="session").hit_blocks
    best = sum(optimal_hits(requests, capacity))

    assert (session - lru) / (best - lru) >= closed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("capacity", [300, 1_500, 6_000])
def test_session_is_not_worse_than_lru_on_made_sessions(seed, capacity):
    """The policy finds at least LRU minus 0.3 points on chats, documents and agents for which
    nothing was tuned."""
    requests = make_sessions(2_500, seed=seed)
    lru = replay_cache(requests, capacity).block_hit
    session = replay_cache(requests, capacity, eviction="session").block_hit

    assert session >= lru - 0.003
