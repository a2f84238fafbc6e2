"""How many blocks fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.device import budget
from headwater.device.budget import free_main_bytes
from headwater.device.kv import KVPool
from headwater.device.memory import num_blocks_that_fit
from headwater.device.model import LoadedModel, load
from headwater.errors import ConfigError

MIB = 1 << 20


def test_the_pool_and_its_buffers_stay_within_the_share(llama: LoadedModel) -> None:
    """The pool and its buffers take half of the free memory, and little is wasted."""
    blocks = num_blocks_that_fit(llama, block_tokens=16, available_bytes=64 * MIB)

    used = blocks * 16 * llama.token_bytes * 2
    assert 31 * MIB < used <= 32 * MIB


def test_the_default_pool_is_measured_and_bounded(llama: LoadedModel) -> None:
    """By default a machine with much memory does not use all of it."""
    much = num_blocks_that_fit(llama, block_tokens=16, available_bytes=1 << 45)

    assert much * 16 * llama.token_bytes <= 4 << 30
    assert num_blocks_that_fit(llama, block_tokens=16) >= 1


def test_a_gpu_gives_its_share_less_what_a_step_computes_in(llama: LoadedModel) -> None:
    """A GPU has no contiguous buffers; the default share is nine tenths, and a larger step
    leaves less."""
    model = replace(llama, device=torch.device("cuda", 0))
    free = 63 << 30

    small, large = (
        num_blocks_that_fit(model, block_tokens=16, available_bytes=free, step_tokens=tokens)
        for tokens in (256, 8192)
    )

    block_bytes = 16 * llama.token_bytes
    assert large < small
    assert 0.85 * free < large * block_bytes < small * block_bytes < 0.9 * free
    with pytest.raises(ConfigError, match="no block fits"):
        num_blocks_that_fit(model, block_tokens=16, available_bytes=1 << 30)


def test_an_override_is_honoured(llama: LoadedModel) -> None:
    """A given number is used."""
    assert num_blocks_that_fit(llama, block_tokens=16, override=7, available_bytes=1) == 7


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"available_bytes": 1000}, "no block fits"),
        ({"override": 0}, "at least one block"),
        ({"utilization": 0.0}, "utilization"),
        ({"block_tokens": 0}, "block_tokens"),
    ],
)
def test_invalid_memory_settings_are_refused_before_serving(
    llama: LoadedModel, asked: dict[str, int], why: str
) -> None:
    """Invalid settings raise a ConfigError with a message, at start (lesson 61)."""
    with pytest.raises(ConfigError, match=why):
        num_blocks_that_fit(llama, **{"block_tokens": 16, **asked})


def test_more_blocks_than_memory_get_a_message(llama: LoadedModel) -> None:
    """Too many blocks are a ConfigError with the requested size, not the allocator's message
    (lesson 61)."""
    with pytest.raises(ConfigError, match=r"blocks of KV take .* GiB"):
        KVPool(llama, num_blocks=1 << 40, block_tokens=16)


@pytest.mark.parametrize(
    ("device", "why"),
    [("banana", "cannot be used"), ("cuda:99", "cannot be used"), ("meta", "is not supported")],
)
def test_a_device_that_does_not_exist_gets_a_message(device: str, why: str) -> None:
    """The error comes before a model is read; the message names the device (lesson 61)."""
    with pytest.raises(ConfigError, match=f"device '{device}' {why}"):
        load("/no/such/model", device=device)


def test_a_control_group_bounds_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that the control group uses counts, without cached files; without a limit or a
    group, the machine's own memory counts."""
    monkeypatch.setattr(budget, "_CGROUP", tmp_path)
    whole = free_main_bytes()
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{70 * MIB}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon {30 * MIB}\nactive_file {15 * MIB}\ninactive_file {20 * MIB}\nshmem {5 * MIB}\n"
    )

    bounded = free_main_bytes()
    (tmp_path / "memory.max").write_text("max\n")

    assert bounded == 65 * MIB
    assert whole > bounded
    assert free_main_bytes() > bounded
