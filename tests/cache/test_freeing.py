"""Freeing and eviction: one test for each known failure of other engines (lessons 1 to 12)."""

import numpy as np
import pytest

from headwater.cache import CacheConfig, MissReason, TieredCache
from headwater.cache.policy import Orders
from headwater.cache.policy.lru import Lru
from headwater.cache.pool import SlotState
from headwater.errors import CacheUseError, InvariantError
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


class ParentsFirst(Lru):
    """Offers a node before its children, as a policy may."""

    def __init__(self):
        super().__init__()
        self.victims = lambda: reversed(list(self._order))


def test_eviction_frees_one_batch_per_take():
    """Lesson 1: the pool is called once, however many leaves are evicted."""
    cache = make_cache(8)
    for leaf in range(8):
        serve(cache, make_path(leaf))
    batches = []
    reuse = cache._device.pool.reuse

    def counted(parts, *how):
        batches.append(sum(len(part) for part in parts))
        return reuse(parts, *how)

    cache._device.pool.reuse = counted

    assert len(cache.take(5, now=0.0)) == 5
    assert batches == [5]


def test_an_evicted_node_owns_nothing():
    """Lesson 2: slots are moved out of the node, so no second path can free them again."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2))
    node = cache.match(make_path(1, 2)).nodes[0]
    cache.take(4, now=0.0)

    assert len(node.device) == 0
    assert (node.tokens, node.keys) == (b"", None)  # stale references keep no prompt alive
    cache.check()


def test_slots_held_for_output_are_freed_once():
    """Lesson 2: only the release returns blocks that are held for output."""
    cache = make_cache(4)
    lease, held = begin(cache, make_path(1, 2, 3))
    cache.commit(lease, make_path(1, 2, 3), held[:2], now=0.0)
    cache.release(lease, now=0.0, slots=held[2:])

    with pytest.raises(InvariantError, match="FREE, not HELD"):
        cache.free(held[2:])
    assert cache.stats().device.free == 2
    cache.check()


def test_an_evicted_node_is_terminal_at_once():
    """Lesson 3: every remaining reference shows that the node is gone."""
    cache = make_cache(2, host_blocks=4, write_policy=WritePolicy.NONE)
    serve(cache, make_path(1, 2))
    match = cache.match(make_path(1, 2))
    cache.take(2, now=0.0)

    assert match.nodes[0].gone
    assert cache.plan_load(match, limit_blocks=9, now=0.0) is None
    assert cache.lease(match, owner="late", now=0.0).num_blocks == 0
    cache.check()


def test_a_parent_is_evicted_only_after_its_child():
    """Lesson 4: the child is detached first; then the parent is a leaf, in the same batch."""
    cache = make_cache(6)
    serve(cache, make_path(1, 2))
    serve(cache, make_path(1, 3))
    serve(cache, make_path(1, 4))

    cache.take(5, now=0.0)

    assert blocks_by_tier(cache, make_path(1, 2)) == (1, 0, 0)
    cache.take(1, now=0.0)
    assert blocks_by_tier(cache, make_path(1, 2)) == (0, 0, 0)
    cache.check()


def test_a_node_cannot_enter_the_order_twice():
    """Lesson 5: being in the order already is an error, never a warning."""
    cache = make_cache(4)
    serve(cache, make_path(1))
    node = cache.match(make_path(1)).nodes[0]

    with pytest.raises(InvariantError, match="twice"):
        cache._device.order.add(node, 0.0)


def test_an_evicted_node_never_comes_back_into_the_order():
    """Lesson 5: the same prompt later creates another node."""
    cache = make_cache(2)
    serve(cache, make_path(1))
    gone = cache.match(make_path(1)).nodes[0]
    cache.free(cache.take(2, now=0.0))
    serve(cache, make_path(1))

    assert gone.gone
    assert gone not in cache._device.order
    assert cache.match(make_path(1)).nodes[0] is not gone


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("shape", ["chain", "leaves", "shared"])
def test_eviction_frees_exactly_the_requested_number(count, shape):
    """Lesson 6: for chains, single leaves and shared parents, exactly as many blocks as asked
    are freed."""
    cache = make_cache(8)
    prompts = {
        "chain": ["12345678"],
        "leaves": list("12345678"),
        "shared": ["123", "1245", "167", "168"],
    }
    for prompt in prompts[shape]:
        serve(cache, make_path(*map(int, prompt)))
    assert cache.stats().device.cached == 8

    taken = cache.take(count, now=0.0)

    assert len(set(taken.tolist())) == count
    assert cache.stats().device.cached == 8 - count
    assert cache.stats().evicted_device == count
    cache.check()


def test_a_double_free_raises_and_changes_nothing():
    """Lesson 7: a double free is an exception, not a log line, and nothing has changed."""
    cache = make_cache(4)
    slots = cache.take(3, now=0.0)
    cache.free(slots[:1])

    with pytest.raises(InvariantError):
        cache.free(slots)
    assert cache.stats().device.held == 2
    cache.check()


@pytest.mark.parametrize("count", [-1, -7])
def test_negative_counts_change_nothing(count):
    """Lesson 8: a negative count is a typed error."""
    cache = make_cache(4)
    before = cache.stats()

    with pytest.raises(CacheUseError):
        cache.take(count, now=0.0)
    with pytest.raises(CacheUseError):
        cache.match(make_path(1), count)
    with pytest.raises(CacheUseError):
        cache.plan_offloads(limit_blocks=count, now=0.0)
    with pytest.raises(CacheUseError):
        cache.plan_load(cache.match(make_path(1)), limit_blocks=count, now=0.0)
    assert cache.stats() == before


def test_two_sequences_with_the_same_blocks_free_each_slot_once():
    """Lesson 8: of two equal blocks the first published stays; the slots of the other are
    surplus."""
    cache = make_cache(8)
    path = make_path(1, 2)
    first, held_first = begin(cache, path, "a")
    second, held_second = begin(cache, path, "b")

    assert len(cache.commit(first, path, held_first, now=0.0)) == 0
    surplus = cache.commit(second, path, held_second, now=0.0)
    assert surplus.tolist() == held_second.tolist()
    cache.release(first, now=0.0)
    cache.release(second, now=0.0, slots=surplus)

    assert cache.stats().device.cached == 2
    assert cache.stats().device.free == 6
    cache.check()


def test_the_tail_of_a_path_is_evicted_before_its_head():
    """Lesson 9: releasing a path never makes its root the oldest block."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2, 3, 4))

    for left in (3, 2, 1, 0):
        cache.take(1, now=0.0)
        assert blocks_by_tier(cache, make_path(1, 2, 3, 4)) == (left, 0, 0)


def test_a_shared_head_outlives_what_was_used_before_it():
    """Lesson 9: using a prefix keeps it; an older branch goes first."""
    cache = make_cache(5)
    serve(cache, make_path(1, 2))
    serve(cache, make_path(7, 8))
    serve(cache, make_path(1, 3))

    cache.take(3, now=0.0)

    assert blocks_by_tier(cache, make_path(1, 3)) == (2, 0, 0)
    assert blocks_by_tier(cache, make_path(7, 8)) == (0, 0, 0)


def test_host_copies_of_device_blocks_are_reclaimable():
    """Lesson 10: hot device blocks, leased ones too, do not pin host capacity."""
    cache = make_cache(8, host_blocks=2, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2))
    write_down(cache)
    lease = cache.lease(cache.match(make_path(1, 2)), owner="hot", now=0.0)
    serve(cache, make_path(3, 4))
    write_down(cache)

    cache.take(4, now=0.0)
    cache.take(2, now=0.0)

    assert blocks_by_tier(cache, make_path(3, 4)) == (0, 2, 0)
    assert lease.num_blocks == 2
    cache.check()


@pytest.mark.parametrize("leaves", [10, 1000])
def test_eviction_looks_only_at_what_it_evicts(leaves):
    """Lesson 11: the cost of one eviction does not depend on the number of leaves."""
    cache = make_cache(leaves)
    for leaf in range(leaves):
        serve(cache, make_path(leaf))
    looked_at = []
    victims = cache._device.order.victims

    def counted():
        for node in victims():
            looked_at.append(node)
            yield node

    cache._device.order.victims = counted

    cache.take(3, now=0.0)

    assert len(looked_at) == 3


def test_probes_do_not_pin():
    """Lesson 12: a match alone keeps nothing."""
    cache = make_cache(2)
    serve(cache, make_path(1, 2))
    cache.match(make_path(1, 2))

    assert len(cache.take(2, now=0.0)) == 2


def test_pins_have_an_owner_and_an_expiry():
    """Lesson 12: a lease that is not renewed expires."""
    cache = make_cache(2)
    serve(cache, make_path(1, 2))
    cache.lease(cache.match(make_path(1, 2)), owner="peer", now=0.0, expires_s=5.0)
    assert cache.take(1, now=1.0) is None

    assert cache.expire(4.9) == []
    assert [lease.owner for lease in cache.expire(5.0)] == ["peer"]
    assert len(cache.take(2, now=5.0)) == 2
    cache.check()


def test_there_is_a_victim_whenever_nothing_is_leased():
    """Lesson 12: the count of available blocks is exact, so taking is all or nothing."""
    cache = make_cache(6, host_blocks=6, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2, 3))
    serve(cache, make_path(1, 2, 4))
    write_down(cache)

    assert cache.num_available == 6
    assert len(cache.take(6, now=0.0)) == 6
    assert cache.num_available == 0
    assert cache.take(1, now=0.0) is None


def test_a_leased_block_is_never_evicted():
    """A pin covers the whole path; only blocks after the path can be evicted."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2, 3, 4))
    lease = cache.lease(cache.match(make_path(1, 2)), owner="r", now=0.0)

    assert cache.take(3, now=0.0) is None
    assert len(cache.take(2, now=0.0)) == 2
    states = cache._device.pool.states()[lease.slots]
    assert np.all(states == SlotState.CACHED)
    assert cache.match(make_path(1, 2, 3)).reason is MissReason.EVICTED_DEVICE


@pytest.mark.parametrize("count", [1, 2])
def test_a_node_is_never_evicted_before_its_children(count):
    """A policy may offer a parent first: its children are evicted before it all the same."""
    config = CacheConfig(device_blocks=3, block_tokens=BLOCK)
    cache = TieredCache(config, Orders(ParentsFirst(), ParentsFirst()))
    serve(cache, make_path(1, 2))
    serve(cache, make_path(1, 3))

    taken = cache.take(count, now=0.0)

    assert taken is not None
    assert len(taken) == count
    assert cache.match(make_path(1)).device_blocks == 1
    cache.check()
