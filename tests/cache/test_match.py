"""Matching has no effects: lengths by tier, reasons, media, namespaces."""

from headwater.cache import (
    MediaSpan,
    MissReason,
    Namespace,
    media_by_block,
)
from headwater.types import WritePolicy
from tests.cache.make import (
    BLOCK,
    begin,
    blocks_by_tier,
    make_cache,
    make_path,
    serve,
    write_down,
)


def test_a_match_changes_nothing():
    """A match changes neither the tree nor a pool, for a hit and for a miss."""
    cache = make_cache()
    serve(cache, make_path(1, 2, 3))
    before = cache.stats()

    for path in (make_path(1, 2), make_path(1, 9), make_path(5), make_path()):
        cache.match(path)

    assert cache.stats() == before


def test_a_full_hit_leaves_the_last_token_to_compute():
    """The caller's limit keeps the block of the last token out of the match."""
    cache = make_cache()
    path = make_path(1, 2)
    serve(cache, path)

    match = cache.match(path, (len(path.tokens) - 1) // BLOCK)

    assert match.device_blocks == 1
    assert match.reason is None


def test_each_block_counts_for_the_highest_tier_that_has_it():
    """Lesson 22: device blocks lead, host blocks follow, then storage blocks."""
    cache = make_cache(4, host_blocks=8, storage=True, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2, 3))
    write_down(cache)
    write_down(cache)
    cache.free(cache.take(2, now=0.0))
    cache.learn_stored(make_path(1, 2, 3, 4, 5), 5, now=0.0)

    match = cache.match(make_path(1, 2, 3, 4, 5, 6))

    counts = (match.device_blocks, match.host_blocks, match.storage_blocks)
    assert counts == (2, 1, 2)


def test_reasons_for_a_miss():
    """Lesson 63: every miss has a reason."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2, 3))
    lease, _ = begin(cache, make_path(7), "x")
    cache.announce(lease, make_path(7))

    assert cache.match(make_path(1, 2, 3)).reason is None
    assert cache.match(make_path(1, 9)).reason is MissReason.NEVER_SEEN
    assert cache.match(make_path(9)).reason is MissReason.NEVER_SEEN
    assert cache.match(make_path()).reason is MissReason.TOO_SHORT
    assert cache.match(make_path(7)).reason is MissReason.IN_FLIGHT
    cache.take(2, now=0.0)
    assert cache.match(make_path(1, 2, 3)).reason is MissReason.EVICTED_DEVICE
    assert cache.match(make_path(1, 5)).reason is MissReason.NEVER_SEEN


def test_a_reason_tells_nothing_about_another_tenant():
    """Lesson 63: a tenant never sees what another tenant had."""
    cache = make_cache(2)
    mine = make_path(1, 2, namespace=Namespace(salt="a"))
    serve(cache, mine)
    lease, _ = begin(cache, make_path(3, namespace=Namespace(salt="a")), "x")
    cache.announce(lease, make_path(3, namespace=Namespace(salt="a")))

    assert cache.match(mine).reason is MissReason.EVICTED_DEVICE
    for other in (
        make_path(1, 2),
        make_path(1, 2, namespace=Namespace(salt="b")),
        make_path(3),
    ):
        assert cache.match(other).reason is MissReason.NEVER_SEEN


def test_evicted_is_remembered_below_a_node_that_came_back():
    """After the eviction of parent and child, the child is still known as evicted when the
    parent is back."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2, 3))
    serve(cache, make_path(1, 5))
    cache.free(cache.take(4, now=0.0))
    serve(cache, make_path(1))

    assert cache.match(make_path(1, 2)).reason is MissReason.EVICTED_DEVICE
    assert cache.match(make_path(1, 6)).reason is MissReason.NEVER_SEEN


def test_ghosts_are_bounded():
    """Metadata of evicted blocks does not grow for ever."""
    cache = make_cache(2, max_ghosts=10)
    for leaf in range(100):
        serve(cache, make_path(leaf, leaf + 1))

    assert 5 <= len(cache._ghosts) <= 10


def test_media_are_compared_in_the_tree():
    """The same placeholder tokens with another image are another block, locally too."""
    cache = make_cache()
    cat = make_path(1, 9, media=media_by_block([MediaSpan(BLOCK, BLOCK + 2, b"cat")], BLOCK))
    dog = make_path(1, 9, media=media_by_block([MediaSpan(BLOCK, BLOCK + 2, b"dog")], BLOCK))
    serve(cache, cat)

    assert blocks_by_tier(cache, cat) == (2, 0, 0)
    assert blocks_by_tier(cache, dog) == (1, 0, 0)
    assert blocks_by_tier(cache, make_path(1, 9)) == (1, 0, 0)


def test_namespaces_share_nothing():
    """Lesson 67: another salt or another adapter finds nothing, on any tier."""
    cache = make_cache(host_blocks=8, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2, namespace=Namespace(salt="a")))
    write_down(cache)

    assert blocks_by_tier(cache, make_path(1, 2)) == (0, 0, 0)
    assert blocks_by_tier(cache, make_path(1, 2, namespace=Namespace(adapter="a"))) == (0, 0, 0)
    assert blocks_by_tier(cache, make_path(1, 2, namespace=Namespace(salt="a"))) == (2, 0, 0)
