"""`headwater bench cache`: it prints the documented figures, and its cache is an exact LRU."""

import json
from argparse import Namespace

import pytest

from headwater.bench import cache as bench
from headwater.bench._cache_parts import measure_parts
from headwater.bench._cache_steps import measure_steps
from headwater.bench._workload import make_workload
from headwater.cli import main
from headwater.errors import ConfigError
from headwater.replay.trace import read_trace
from tests.cache.naive import NaiveLru


@pytest.mark.slow
def test_json_has_the_promised_keys(capsys):
    """With --json the command prints one JSON object on standard output, and nothing else."""
    assert main(["bench", "cache", "--quick", "--requests", "50", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    for name in ("mean_us", "p50_us", "p99_us", "match_131072_us", "insert_131072_us"):
        assert result[name] > 0
    assert result["hit_tokens"] > 0
    assert result["metadata_bytes_per_block"] > 4 * 64
    assert "evicted_blocks" in result
    assert set(result["take_us"]) == {"1000", "10000", "100000"}
    assert set(result["take_us"]["1000"]) == {"1", "64", "1000", "10000"}


@pytest.mark.parametrize("capacity_tokens", [60_000, 4_000_000])
def test_hits_are_those_of_a_naive_model(capacity_tokens):
    """The same workload through a dict of blocks hits the same number of tokens."""
    requests = [r for r in make_workload(150) if r.input_length < 20_000]
    options = Namespace(block=512, capacity_tokens=capacity_tokens)
    model = NaiveLru(capacity_tokens // 512, 512)
    hits = 0
    for number, request in enumerate(requests):
        prompt = request.prompt().tolist()
        whole = prompt + request.output(number).tolist()
        blocks = model.blocks(whole)
        found = model.match(prompt, (len(prompt) - 1) // 512)
        hits += found * 512
        model.lease(blocks[:found])
        first = -(-len(prompt) // 512)
        assert model.take(first - found)
        surplus = model.commit(blocks[found : len(prompt) // 512])
        growth = -(-len(whole) // 512) - first
        assert model.take(growth)
        done = max(len(prompt) // 512, found)
        surplus += model.commit(blocks[done:])
        published = len(blocks) - found - surplus
        model.release(blocks, first - found + growth - published)

    result = bench.replay(requests, options)

    assert result["hit_tokens"] == hits > 0
    assert (result["evicted_blocks"] > 0) == (capacity_tokens == 60_000)


def test_the_workload_is_the_same_every_time():
    """The same seed gives the same workload."""
    assert make_workload(20) == make_workload(20)
    assert make_workload(20) != make_workload(20, seed=2)


def test_a_missing_or_broken_trace_gets_a_message(tmp_path, capsys):
    """An error in a trace is reported with its line."""
    broken = tmp_path / "trace.jsonl"
    broken.write_text('{"hash_ids": [1], "input_length": 3, "output_length": 1}\n{}\n')

    with pytest.raises(ConfigError, match="line 2"):
        read_trace(broken, 10)
    assert main(["bench", "cache", "--trace", str(tmp_path / "none.jsonl")]) == 1
    assert "cannot read the trace" in capsys.readouterr().err


def test_every_configuration_uses_its_tiers_and_records_its_events():
    """Each configuration does what its name says: writes to its tiers, loads from them, and
    records events."""
    parts = measure_parts(make_workload(400), capacity_blocks=2_000, block=64, repeats=1)

    done = {name: row["per_request"] for name, row in parts.items()}
    assert list(parts) == [
        *("device", "host", "storage", "events", "block_commits", "session", "write_through")
    ]
    assert "jobs_to_host" not in done["device"]
    assert done["host"]["jobs_to_host"] > 0
    assert done["host"]["load_jobs"] > 0
    assert done["storage"]["blocks_to_storage"] > 0
    assert done["storage"]["events"] == 0 < done["events"]["events"]
    assert done["block_commits"]["commits"] > done["events"]["commits"]
    assert done["write_through"]["blocks_to_host"] > done["block_commits"]["blocks_to_host"]
    assert parts["host"]["hit_tokens"] > parts["device"]["hit_tokens"]


def test_steps_of_many_sequences_are_measured():
    """The report has the times to schedule and encode a step in which every sequence fills a
    block."""
    steps = measure_steps(40, block=16, num_steps=20)

    assert 0 < steps["median_ms"] <= steps["worst_ms"]
    assert steps["schedule_ms"] > 0
