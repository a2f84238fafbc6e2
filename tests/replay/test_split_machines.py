"""Machines whose model is split over ranks: compute is divided, collectives are added."""

import pytest

from headwater.cli import main
from headwater.errors import ConfigError
from headwater.replay.cost import LinkCost
from headwater.replay.presets import preset
from headwater.replay.ranks import split_over_ranks

NVLINK = LinkCost(bytes_s=300e9, latency_s=1e-5)


def _step_s(machine, **work):
    given = {"prompt_tokens": 0, "pairs": 0, "rows": 0, "context": 0, **work}
    return machine.step.seconds(**given)


def test_one_rank_is_the_machine_itself():
    """With one rank no collective is added."""
    machine = preset("h200-8b")

    assert split_over_ranks(machine, 1, NVLINK) is machine


def test_two_ranks_decode_faster_by_less_than_two():
    """Each rank reads half of the weights and of the KV. Every layer has two sums between the
    ranks, which cost 64 latencies."""
    one = preset("h200-8b")
    two = split_over_ranks(one, 2, NVLINK)
    work = {"rows": 8, "context": 8 * 4096}

    faster = _step_s(one, **work) / _step_s(two, **work)

    assert 1.3 < faster < 2.0
    assert two.step.launch_s == pytest.approx(one.step.launch_s + 64 * 1e-5)


def test_a_slow_link_makes_prompts_slower_than_on_one_device():
    """Sending the states of 8 k tokens in every layer at 1 GB/s takes longer than computing
    them on one device."""
    one = preset("h200-8b")
    slow = split_over_ranks(one, 2, LinkCost(bytes_s=1e9, latency_s=1e-5))

    assert _step_s(slow, prompt_tokens=8192) > _step_s(one, prompt_tokens=8192)


def test_ranks_have_their_own_memory_and_links_to_the_host():
    """Storage and peers are reached as before."""
    one = preset("h200-8b")
    four = split_over_ranks(one, 4, NVLINK)

    assert four.device_gib == 4 * one.device_gib
    assert four.links["host_to_device"].bytes_s == 4 * one.links["host_to_device"].bytes_s
    assert four.links["storage_to_host"] == one.links["storage_to_host"]
    assert four.links["peer"] == one.links["peer"]


def test_no_rank_is_an_error():
    """An invalid link is an error too."""
    with pytest.raises(ConfigError, match="at least 1"):
        split_over_ranks(preset("h200-8b"), 0, NVLINK)


def test_a_collective_link_is_two_numbers(tmp_path, capsys):
    """The message shows how the two numbers are written."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1]}\n'
    )
    flags = ["--tensor-parallel-size", "2", "--collective-link"]

    assert main(["replay", str(trace), *flags, "fast"]) == 1
    assert "such as 300:10" in capsys.readouterr().err
    assert main(["replay", str(trace), *flags, "300:10"]) == 0
