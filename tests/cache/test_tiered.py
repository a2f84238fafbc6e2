"""TieredCache as a whole: resets, and settings that cannot work."""

import pytest

from headwater.cache import (
    CacheConfig,
    JobEffect,
    MissReason,
    Namespace,
)
from headwater.errors import ConfigError
from headwater.types import WritePolicy
from tests.cache.make import (
    begin,
    blocks_by_tier,
    done,
    make_cache,
    make_on_host,
    make_path,
    serve,
    write_down,
)


def test_reset_forgets_and_bumps_the_generation():
    """All blocks without a lease are free at once."""
    cache = make_cache(host_blocks=4, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2))
    write_down(cache)
    cache.reset()

    assert blocks_by_tier(cache, make_path(1, 2)) == (0, 0, 0)
    assert cache.match(make_path(1, 2)).reason is MissReason.NEVER_SEEN
    assert cache.stats().device.free == 8
    assert cache.stats().host.free == 4
    assert cache.stats().generation == 1
    cache.check()


def test_reset_under_load():
    """Lesson 59: a running sequence keeps its blocks, publishes nothing, and frees them once."""
    cache = make_cache()
    path = make_path(1, 2, 3)
    serve(cache, make_path(1))
    lease, held = begin(cache, path)
    cache.reset()

    surplus = cache.commit(lease, path, held, now=0.0)
    assert surplus.tolist() == held.tolist()
    assert lease.num_blocks == 3
    cache.announce(lease, make_path(1, 2, 3, 4))
    assert blocks_by_tier(cache, path) == (0, 0, 0)
    cache.check()
    cache.release(lease, now=0.0, slots=surplus)
    assert cache.stats().device.free == 8
    cache.check()


def test_late_results_of_an_older_generation_only_release():
    """Lesson 17: a transfer that ends after a reset attaches nothing."""
    cache = make_on_host()
    plan = cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)
    cache.reset()
    serve(cache, make_path(1, 2))

    assert cache.finish_job(done(plan), now=0.0) is JobEffect.NOTHING
    assert cache.stats().device.free == 2
    assert cache.stats().host.free == 8
    cache.check()


@pytest.mark.parametrize(
    "settings",
    [
        {"block_tokens": 0},
        {"device_blocks": -1},
        {"host_blocks": -1},
        {"select_hits": 0},
        {"eviction": "fifo"},
        {"storage": True},
        {"write_policy": "write_through"},
    ],
)
def test_impossible_settings_are_refused(settings):
    """Lessons 28 and 61: settings that cannot work are an error when they are created."""
    with pytest.raises(ConfigError):
        CacheConfig(**{"device_blocks": 4, **settings})


def test_empty_namespaces_are_forgotten():
    """Salts that are used once do not accumulate."""
    cache = make_cache(4)
    for tenant in range(9_000):
        cache.release(
            cache.lease(
                cache.match(make_path(1, namespace=Namespace(salt=str(tenant)))),
                owner="r",
                now=0.0,
            ),
            now=0.0,
        )

    assert len(cache._tree.roots) <= 4096
