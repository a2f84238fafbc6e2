"""`headwater bench pd --quick` runs to its end and prints the documented figures."""

import json

import pytest

from headwater.bench.pd import main

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_the_engine_part_prints_its_figures(capsys):
    """Two pairs of servers answer a few requests, and one JSON object is printed."""
    assert main(["--quick", "--json", "--parts", "engine"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert set(result["pd_over_mixed"]) == {"ttft", "throughput", "itl_tail"}
    assert set(result["routed_over_mixed"]) == {"ttft", "throughput", "itl_tail"}
    parts = {"start", "queue", "ask", "compute", "push", "first_token"}
    assert set(result["handoff_ms"]) == parts
    assert result["handoff_ms"]["first_token"] > 0
    assert 0 < result["second_turn_byte_share"] < 0.5


def test_a_pair_finds_on_a_trace_what_a_mixed_instance_finds(capsys):
    """Lesson 48: the pair, whose P is as large as the mixed instance, finds as many prompt
    tokens."""
    assert main(["--quick", "--json", "--parts", "hits"]) == 0

    hits = json.loads(capsys.readouterr().out)["pd_hits"]
    assert hits["mixed"] > 0
    assert 1.0 <= hits["ratio"] < 1.01
