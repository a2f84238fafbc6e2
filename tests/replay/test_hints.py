"""Replay with hints: what clients would say about their sessions, and its benefit."""

import json

import pytest

from headwater.bench._shapes import SHAPES, make_shape
from headwater.cache import Hint
from headwater.cli import main
from headwater.replay.cache_only import replay_cache
from headwater.replay.hints import NOTHING, SessionHint, hints_of
from headwater.replay.optimum import optimal_hits
from tests.replay.traces import make_request, needs_traces, public_trace

GOES_ON, CLOSED = Hint(), Hint(closed=True)


def test_a_perfect_hint_says_whether_the_session_goes_on():
    """A session continues if most of its full blocks are used again; partial ones never
    count."""
    requests = [
        make_request([1, 2, 3]),
        make_request([1, 2, 4, 5]),
        make_request([7, 8]),
        make_request([1, 2, 4, 5]),
        make_request([7, 9, 10, 11]),
    ]

    assert hints_of(requests, "none") == [NOTHING] * 5
    assert hints_of(requests, "perfect") == [
        SessionHint("1", GOES_ON),
        SessionHint("1", GOES_ON),
        SessionHint("7", GOES_ON),
        SessionHint("1", CLOSED),
        SessionHint("7", CLOSED),
    ]


def test_a_prefix_of_many_sessions_belongs_to_no_session_of_a_trace():
    """A shared beginning is used again and again, whatever happens to one session."""
    requests = [make_request([0, 10 + n, 40 + n]) for n in range(20)]

    assert hints_of(requests, "perfect") == [
        SessionHint(str(10 + n), CLOSED) for n in range(20)
    ]


@pytest.mark.parametrize("name", ["arc", "lru", "s3fifo", "session"])
def test_hints_help_every_policy(name):
    """Hints help on synthetic sessions, where most cached blocks are never used again."""
    requests = make_shape("mixed", 1_500, 3)
    plain = replay_cache(requests, 1_000, eviction=name)
    hinted = replay_cache(requests, 1_000, eviction=name, hints="perfect")

    assert hinted.hit_blocks > plain.hit_blocks
    assert hinted.hit_blocks <= sum(optimal_hits(requests, 1_000))


def test_the_command_takes_hints(tmp_path, capsys):
    """`--hints perfect` finds more in the cache alone, and reaches the engine's requests."""
    trace = tmp_path / "trace.jsonl"
    paths = [[1, 2], [3, 4], [5, 6], [1, 2, 7], [8, 9], [1, 2, 7, 10]]
    rows = [
        {"timestamp": n, "input_length": 512 * len(p), "output_length": 1, "hash_ids": p}
        for n, p in enumerate(paths)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["replay", str(trace), "--cache-only", "--capacity-blocks", "4", "--json"]
    found = {}
    for hints in ("none", "perfect"):
        assert main([*flags, "--hints", hints]) == 0
        found[hints] = json.loads(capsys.readouterr().out)["block_hit"]
    assert found["perfect"] > found["none"]

    assert main(["replay", str(trace), "--hints", "perfect", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache_hints"] == {"closed": 4, "granted": 2}


@needs_traces
@pytest.mark.slow
def test_knowing_whether_sessions_return_closes_most_of_the_gap():
    """Hints close at least 85 % of the gap from the LRU to the optimum, at 5,859 blocks of the
    conversation trace."""
    requests = public_trace("conversation")
    lru = replay_cache(requests, 5_859).hit_blocks
    hinted = replay_cache(requests, 5_859, eviction="session", hints="perfect").hit_blocks
    best = sum(optimal_hits(requests, 5_859))

    assert (hinted - lru) / (best - lru) >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("capacity", [300, 1_500, 6_000])
def test_session_is_not_worse_than_lru_on_unseen_shapes(shape, capacity):
    """The policy finds at least LRU minus 0.3 points without initial weights, also for loops,
    scans and changed habits."""
    requests = make_shape(shape, 2_500, seed=21)
    lru = replay_cache(requests, capacity).block_hit
    session = replay_cache(requests, capacity, eviction="session").block_hit

    assert session >= lru - 0.003
