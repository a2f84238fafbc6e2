"""`headwater bench eviction` prints the documented figures."""

import json

import pytest

from headwater.bench._shapes import SHAPES, make_shape
from headwater.bench._workload import make_sessions
from headwater.cli import main


@pytest.mark.slow
def test_json_has_the_promised_keys(capsys):
    """The report has block hits by policy and capacity, and which share of the gap between LRU
    and the optimum each policy closes."""
    flags = ["--quick", "--requests", "300", "--capacity", "50,100000", "--json"]
    assert main(["bench", "eviction", *flags]) == 0

    result = json.loads(capsys.readouterr().out)
    hits = result["block_hit"]
    assert set(hits) == {"arc", "lru", "s3fifo", "session", "optimum"}
    assert all(set(row) == {"50", "100000"} for row in hits.values())
    assert all(row["50"] <= hits["optimum"]["50"] for row in hits.values())
    assert result["gap_closed"] == result["gap_closed_by_policy"]["session"]
    # A cache that never fills leaves no gap.
    assert result["gap_closed"]["100000"] is None
    assert set(result["us_over_lru"]) == {"arc", "s3fifo", "session"}


def test_invalid_capacities_get_a_message(capsys):
    """The message names the value."""
    for given in ("ten", "0", "5,-1"):
        assert main(["bench", "eviction", "--capacity", given]) == 1
        assert "--capacity" in capsys.readouterr().err


def test_made_sessions_are_the_same_every_time():
    """A seed gives one workload, sorted by time, whose ids have one predecessor each."""
    requests = make_sessions(200)
    assert requests == make_sessions(200)
    assert requests != make_sessions(200, seed=2)
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    before: dict[int, int] = {}
    for request in requests:
        for parent, child in zip([-1, *request.hash_ids], request.hash_ids, strict=False):
            assert before.setdefault(child, parent) == parent


@pytest.mark.slow
def test_hints_are_for_every_policy_but_the_lru(capsys):
    """The gap is measured from an LRU without hints, whatever the other policies get."""
    flags = ["--requests", "800", "--capacity", "300", "--shape", "chats", "--json"]
    results = {}
    for hints in ("none", "perfect"):
        assert main(["bench", "eviction", *flags, "--hints", hints]) == 0
        results[hints] = json.loads(capsys.readouterr().out)

    plain, hinted = (results[hints]["block_hit"] for hints in ("none", "perfect"))
    assert hinted["lru"] == plain["lru"]
    assert hinted["session"]["300"] > plain["session"]["300"]
    assert results["perfect"]["hints"] == "perfect"


def test_a_shape_needs_generated_sessions(tmp_path, capsys):
    """With a trace, --shape would do nothing, so it is refused."""
    flags = ["--trace", str(tmp_path / "t.jsonl"), "--shape", "loops"]
    assert main(["bench", "eviction", *flags]) == 1
    assert "--shape" in capsys.readouterr().err


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_the_same_every_time(shape):
    """A shape and a seed give one workload, sorted by time, whose ids have one predecessor
    each."""
    requests = make_shape(shape, 300, 5)
    assert requests == make_shape(shape, 300, 5)
    assert len(requests) == 300
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    before: dict[int, int] = {}
    for request in requests:
        assert 0 <= request.input_length <= len(request.hash_ids) * 512
        for parent, child in zip([-1, *request.hash_ids], request.hash_ids, strict=False):
            assert before.setdefault(child, parent) == parent
