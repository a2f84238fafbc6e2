"""The tiers below the device: their possible size, and their description at start."""

from typing import Any

import pytest

from headwater.config import EngineConfig
from headwater.device.budget import free_main_bytes
from headwater.errors import ConfigError
from headwater.launch import tiers
from headwater.launch.tiers import default_host_bytes, describe_tiers, host_blocks
from headwater.transfer.layout import KVLayout

LAYOUT = KVLayout(
    num_layers=4, kv_heads=2, head_dim=16, block_tokens=64, dtype="float32", element_bytes=4
)
STORED: dict[str, Any] = {"storage_backend": "file", "storage_config": {"path": "/var/kv"}}
GIB = 1 << 30


def describe(**settings: Any) -> str:
    config = EngineConfig(swap_space_gib=0.25, **settings)
    return "\n".join(describe_tiers(config, LAYOUT, host_blocks(config, LAYOUT)))


def test_a_host_tier_above_the_free_memory_is_refused():
    """Lesson 61: the error comes at start with both sizes, before any memory is allocated, and
    not when the tier has filled."""
    free_gib = free_main_bytes() / (1 << 30)

    for size in (free_gib * 1.2, 1e6):
        with pytest.raises(ConfigError, match=r"more than the [0-9.]+ GiB of main memory"):
            host_blocks(EngineConfig(swap_space_gib=size), LAYOUT)
    with pytest.raises(ConfigError, match="is too small for one block"):
        host_blocks(EngineConfig(swap_space_gib=1e-6), LAYOUT)
    assert host_blocks(EngineConfig(), LAYOUT) == 0


def test_memory_that_another_engine_has_chosen_is_not_free(monkeypatch: pytest.MonkeyPatch):
    """P and D on one GPU start together: the second one takes half of the rest. Half of the same
    free memory for each would be all of it, and the system would kill an engine."""
    monkeypatch.setattr(tiers, "free_main_bytes", lambda: 120 * GIB)
    config = EngineConfig(device="cuda")
    first = host_blocks(config, LAYOUT) * LAYOUT.block_bytes
    second = host_blocks(config, LAYOUT, claimed_bytes=first) * LAYOUT.block_bytes

    assert (first, second) == (60 * GIB, 30 * GIB)


@pytest.mark.parametrize(
    ("settings", "free_gib", "num_gpus", "size_gib"),
    [
        ({"device": "cuda"}, 120, 1, 60),
        ({"device": "cuda"}, 2000, 8, 64),
        ({"device": "cuda:3"}, 500.5, 8, 31),
        ({"device": "cuda"}, 1.9, 1, 0),
        (STORED, 8, 1, 2),
        (STORED, 100, 1, 4),
    ],
)
def test_the_default_host_tier_is_a_share_of_free_memory(
    settings: dict[str, Any], free_gib: float, num_gpus: int, size_gib: int
):
    """Engines on all GPUs of a machine may start at once, and none takes more than 64 GiB."""
    config = EngineConfig(**settings)

    size = default_host_bytes(config, free_bytes=int(free_gib * GIB), num_gpus=num_gpus)

    assert config.may_have_host_tier
    assert size == size_gib * GIB


def test_an_engine_on_several_gpus_has_the_host_tier_of_all_of_them():
    """Each rank's GPU has its own link to main memory."""
    config = EngineConfig(device="cuda", tensor_parallel_size=4)

    assert default_host_bytes(config, free_bytes=1024 * GIB, num_gpus=8) == 4 * 64 * GIB
    assert default_host_bytes(config, free_bytes=160 * GIB, num_gpus=8) == 4 * 10 * GIB


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"device": "cuda", "swap_space_gib": 0.0},
        {"device": "cuda", "prefix_caching": False},
        {"device": "cuda", "write_policy": "none", "save_preempted": False},
    ],
)
def test_no_host_tier_is_chosen_where_none_would_help(settings: dict[str, Any]):
    """On a CPU without storage the KV pool is already main memory."""
    assert not EngineConfig(**settings).may_have_host_tier


def test_storage_without_memory_for_a_host_tier_is_refused():
    """Storage reads and writes host slots: without them it could not be used."""
    with pytest.raises(ConfigError, match="too little to choose one: give --swap-space"):
        default_host_bytes(EngineConfig(**STORED), free_bytes=GIB, num_gpus=1)


def test_the_start_says_that_the_host_tier_was_chosen():
    """The line has the tier's size and the flag that changes it, or says that there was too
    little memory."""
    config = EngineConfig(**STORED)
    chosen = describe_tiers(config, LAYOUT, 100_000)
    none = describe_tiers(EngineConfig(device="cuda"), LAYOUT, 0)

    assert "chosen by free memory; --swap-space changes it" in chosen[0]
    assert "too little main memory is free" in none[0]
    assert describe_tiers(EngineConfig(), LAYOUT, 0) == (
        "host    none; --swap-space GIB adds main memory below the device",
    )


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("write_through", "every computed block is written to it at once"),
        ("auto", "written to it before it leaves the device"),
        ("write_through_selective", "written to it when it is first found again"),
        ("write_back", "when the device is about to evict it"),
        ("none", "not written to it when they are computed or evicted"),
    ],
)
def test_the_start_says_what_fills_the_host_tier(policy: Any, words: str):
    """Lesson 14: each policy has its own sentence, also about preempted sequences."""
    assert words in describe(write_policy=policy)
    assert "preempted sequences are saved" in describe(write_policy=policy)
    assert "preempted ones are not saved" in describe(save_preempted=False)


def test_the_start_says_how_lower_tiers_are_read():
    """The lines say where storage is, and when a wait for it ends."""
    assert "storage" not in describe()
    assert "storage file, /var/kv" in describe(**STORED)
    redis = {"storage_backend": "redis", "storage_config": {"url": "redis://me:secret@box/1"}}
    assert "storage redis, redis://box:6379/1" in describe(**redis)
    assert "secret" not in describe(**redis)
    assert "waits end after 0.5 s" in describe(load_timeout_s=0.5)
    assert "however long it takes" in describe(load_policy="wait")
    assert "waits end" not in describe(load_policy="wait")
    assert "no request waits for storage" in describe(load_policy="best_effort")
