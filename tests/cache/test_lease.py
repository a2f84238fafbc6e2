"""Leases and commits: what is pinned, when a block can be found, what is refused."""

import numpy as np
import pytest

from headwater.cache import (
    InFlight,
    MissReason,
    Namespace,
)
from headwater.errors import CacheUseError, InvariantError, StaleLease
from headwater.types import RequestId, Tier
from tests.cache.make import (
    BLOCK,
    begin,
    blocks_by_tier,
    make_cache,
    make_path,
    serve,
)

X = RequestId("x")


def test_a_block_is_findable_only_after_commit():
    """Lesson 46: held blocks are in flight, and match nothing."""
    cache = make_cache()
    path = make_path(1, 2, 3)
    lease, held = begin(cache, path, "x")
    cache.announce(lease, path)

    before = cache.match(path)
    cache.commit(lease, path, held[:2], now=0.0)
    after = cache.match(path)

    assert (before.num_blocks, before.in_flight) == (0, InFlight(X, 3))
    assert (after.num_blocks, after.in_flight) == (2, InFlight(X, 1))
    cache.release(lease, now=0.0, slots=held[2:])
    assert cache.match(path).in_flight is None


def test_an_in_flight_prefix_has_its_length():
    """Only the blocks that both prompts share count as in flight."""
    cache = make_cache()
    lease, _ = begin(cache, make_path(1, 2, 3), "x")
    cache.announce(lease, make_path(1, 2, 3))

    assert cache.match(make_path(1, 2, 9)).in_flight == InFlight(X, 2)
    assert cache.match(make_path(9, 2)).in_flight is None


def test_a_lease_survives_splits():
    """A prompt that diverges inside a leased run does not disturb the lease."""
    cache = make_cache()
    path = make_path(1, 2, 3, 4)
    serve(cache, path)
    lease = cache.lease(cache.match(path), owner="a", now=0.0)
    serve(cache, make_path(1, 2, 8))
    serve(cache, make_path(1, 9))
    cache.check()

    assert cache.take(5, now=0.0) is None
    assert len(cache.take(4, now=0.0)) == 4
    assert blocks_by_tier(cache, path) == (4, 0, 0)
    cache.release(lease, now=0.0)
    cache.check()


def test_a_stale_match_is_made_again():
    """Lesson 23: a lease never covers blocks that were evicted after the match."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2, 3))
    match = cache.match(make_path(1, 2, 3))
    cache.take(2, now=0.0)

    lease = cache.lease(match, owner="r", now=0.0)

    assert lease.num_blocks == 2
    assert len(lease.slots) == 2
    cache.check()


def test_a_request_that_does_not_fit_rolls_back():
    """Lesson 23: an admission that fails half-way leaves nothing behind."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2))
    before = cache.stats()

    lease = cache.lease(
        cache.match(make_path(1, 2, 3, 4, 5)), owner="r", now=0.0, counted=False
    )
    assert cache.take(3, now=0.0) is None
    cache.release(lease, now=0.0)

    assert cache.stats() == before
    assert blocks_by_tier(cache, make_path(1, 2)) == (2, 0, 0)


def test_decode_grows_one_run():
    """Committing block by block makes one node, not one node per block."""
    cache = make_cache(40)
    path = make_path(*range(32))
    lease, held = begin(cache, path)
    for slot in held:
        cache.commit(lease, path, np.array([slot]), now=0.0)
    cache.release(lease, now=0.0)

    assert cache.stats().nodes == 1
    assert blocks_by_tier(cache, path) == (32, 0, 0)


def test_a_released_lease_is_refused():
    """Every use of a released lease is a typed error and changes nothing."""
    cache, other = make_cache(), make_cache()
    lease, held = begin(cache, make_path(1))
    cache.release(lease, now=0.0, slots=held)
    foreign, _ = begin(other, make_path(1))
    before = cache.stats()

    for bad in (lease, foreign):
        with pytest.raises(StaleLease):
            cache.release(bad, now=0.0)
        with pytest.raises(StaleLease):
            cache.commit(bad, make_path(1), held, now=0.0)
        with pytest.raises(StaleLease):
            cache.announce(bad, make_path(1))
        with pytest.raises(StaleLease):
            cache.save(bad)
    assert cache.stats() == before


def test_invalid_commits_are_refused():
    """A commit of more blocks than the path has, or of another namespace, is an error and
    changes nothing."""
    cache = make_cache()
    lease, held = begin(cache, make_path(1, 2))

    with pytest.raises(CacheUseError):
        cache.commit(lease, make_path(1), held, now=0.0)
    with pytest.raises(CacheUseError):
        cache.commit(lease, make_path(1, 2, namespace=Namespace("a")), held, now=0.0)
    with pytest.raises(CacheUseError):
        cache.learn_stored(make_path(1), 2, now=0.0)
    assert cache.stats().device.held == 2
    cache.check()


def test_a_slot_named_twice_is_not_committed():
    """Lesson 7: one slot cannot become two blocks; nothing has changed when it is refused."""
    cache = make_cache(16)
    path = make_path(*range(12))
    lease, held = begin(cache, path)

    for twins in (held[[0, 0]], held[[*range(11), 3]]):
        with pytest.raises(InvariantError, match="twice"):
            cache.commit(lease, path, twins, now=0.0)
    assert cache.stats().device.held == 12
    cache.check()


def test_a_match_of_another_cache_is_made_again():
    """A lease never refers to nodes of another tree, even if the versions are equal."""
    cache, other = make_cache(), make_cache()
    serve(other, make_path(1, 2))
    serve(cache, make_path(7, 8))

    lease = cache.lease(other.match(make_path(1, 2)), owner="r", now=0.0)

    assert lease.num_blocks == 0
    cache.check()
    other.check()


def test_only_full_blocks_are_committed():
    """Lesson 41: tokens without KV, in a block that is not full, cannot be published."""
    cache = make_cache()
    path = make_path(1, 2)
    path.tokens = path.tokens[:-1]
    lease = cache.lease(cache.match(path), owner="r", now=0.0)
    held = cache.take(2, now=0.0)

    with pytest.raises(CacheUseError):
        cache.commit(lease, path, held, now=0.0)
    cache.commit(lease, path, held[:1], now=0.0)
    assert blocks_by_tier(cache, make_path(1, 2)) == (1, 0, 0)


def test_the_ledger_counts_a_request_once():
    """Lesson 62: probes and resumed sequences are not counted again."""
    cache = make_cache()
    serve(cache, make_path(1, 2))
    cache.match(make_path(1, 2))
    match = cache.match(make_path(1, 2, 3))
    cache.release(cache.lease(match, owner="a", now=0.0), now=0.0)
    cache.release(cache.lease(match, owner="a", now=0.0, counted=False), now=0.0)

    ledger = cache.stats().ledger

    assert ledger.queries == 2
    assert ledger.prompt_tokens == 5 * BLOCK
    assert ledger.found_tokens == ledger.tokens_by_tier[Tier.DEVICE] == 2 * BLOCK
    assert ledger.misses_by_reason == {MissReason.NEVER_SEEN: 2}
