"""How the eviction policies differ, seen from outside: which blocks remain."""

import pytest

from headwater.cache.policy import POLICIES
from headwater.config import EVICTIONS
from headwater.errors import ConfigError
from tests.cache.make import blocks_by_tier, make_cache, make_path, serve


def test_settings_know_every_policy():
    """The command line offers exactly the policies of the cache."""
    assert sorted(EVICTIONS) == sorted(POLICIES)
    with pytest.raises(ConfigError, match="known: arc, lru, s3fifo, session"):
        make_cache(eviction="fifo")


@pytest.mark.parametrize(("name", "stays"), [("lru", False), ("s3fifo", True), ("arc", True)])
def test_a_scan_does_not_evict_blocks_that_were_used_again(name, stays):
    """Twenty prompts that never return pass through a cache of eight blocks."""
    cache = make_cache(device_blocks=8, eviction=name)
    for _ in range(3):
        serve(cache, make_path(1, 2))
    for scanned in range(10, 30):
        serve(cache, make_path(scanned))

    assert (blocks_by_tier(cache, make_path(1, 2)) == (2, 0, 0)) == stays


@pytest.mark.parametrize("name", ["s3fifo", "arc"])
def test_a_block_that_returns_after_its_eviction_is_kept_longer(name):
    """A ghost that returns is kept longer than newer blocks."""
    cache = make_cache(device_blocks=8, eviction=name)
    for prompt in range(12):
        serve(cache, make_path(prompt))
    assert blocks_by_tier(cache, make_path(0)) == (0, 0, 0)
    serve(cache, make_path(0))
    for prompt in range(20, 28):
        serve(cache, make_path(prompt))

    assert blocks_by_tier(cache, make_path(0)) == (1, 0, 0)


def test_reading_an_order_changes_nothing():
    """Reading the next victims does not change them."""
    for name in sorted(POLICIES):
        cache = make_cache(device_blocks=6, eviction=name)
        for prompt in (1, 2, 1, 3, 4, 2):
            serve(cache, make_path(prompt, prompt + 10))
        order = cache._device.order
        first = list(order.victims())

        assert list(order.victims()) == first
        assert len(set(first)) == len(first)
