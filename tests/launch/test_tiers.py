"""What is built below the device: how much of it there can be, and what the start says of it."""

from typing import Any

import pytest

from headwater.config import EngineConfig
from headwater.device.memory import free_main_bytes
from headwater.errors import ConfigError
from headwater.launch.tiers import describe_tiers, host_blocks
from headwater.transfer.layout import KVLayout

LAYOUT = KVLayout(
    num_layers=4, kv_heads=2, head_dim=16, block_tokens=64, dtype="float32", element_bytes=4
)
STORED = {"storage_backend": "file", "storage_config": {"path": "/var/kv"}}


def describe(**settings: Any) -> str:
    config = EngineConfig(swap_space_gib=0.25, **settings)
    return "\n".join(describe_tiers(config, LAYOUT, host_blocks(config, LAYOUT)))


def test_no_more_main_memory_than_there_is():
    """Lesson 61: said at start with both sizes, not found out when the tier has filled; before
    anything is made whose size goes with it."""
    free_gib = free_main_bytes() / (1 << 30)

    for size in (free_gib * 1.2, 1e6):
        with pytest.raises(ConfigError, match=r"more than the [0-9.]+ GiB of main memory"):
            host_blocks(EngineConfig(swap_space_gib=size), LAYOUT)
    with pytest.raises(ConfigError, match="does not hold one block"):
        host_blocks(EngineConfig(swap_space_gib=1e-6), LAYOUT)
    assert host_blocks(EngineConfig(), LAYOUT) == 0


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("write_through", "every computed block is written to it at once"),
        ("auto", "written to it before it leaves the device"),
        ("write_through_selective", "written to it when it is first found again"),
        ("write_back", "when the device is about to evict it"),
        ("none", "no block is written to it by use"),
    ],
)
def test_the_start_says_what_fills_the_host_tier(policy: Any, words: str):
    """Lesson 14: each policy in its own words, and whether preempted sequences are saved."""
    assert words in describe(write_policy=policy)
    assert "preempted sequences are saved" in describe(write_policy=policy)
    assert "preempted ones are not saved" in describe(save_preempted=False)


def test_the_start_says_how_lower_tiers_are_read():
    """Where storage is, and when a wait for it ends."""
    assert "storage" not in describe()
    assert "storage file, /var/kv" in describe(**STORED)
    redis = {"storage_backend": "redis", "storage_config": {"url": "redis://me:secret@box/1"}}
    assert "storage redis, redis://box:6379/1" in describe(**redis)
    assert "secret" not in describe(**redis)
    assert "waits end after 0.5 s" in describe(load_timeout_s=0.5)
    assert "however long it takes" in describe(load_policy="wait")
    assert "waits end" not in describe(load_policy="wait")
    assert "storage is never waited for" in describe(load_policy="best_effort")
