"""The outline of the tree: sizes and ages, never content, within its limits."""

import numpy as np
import pytest

from headwater.cache import CacheConfig, Namespace, TieredCache, TokenPath
from headwater.types import RequestId

BLOCK = 4


def fill(cache, tokens, salt=""):
    """Compute and release one prompt of whole blocks."""
    path = TokenPath(np.array(tokens, dtype=np.int32), Namespace(salt))
    lease = cache.lease(cache.match(path), owner=RequestId("r"), now=0.0)
    slots = cache.take(path.num_blocks(BLOCK) - lease.num_blocks, now=0.0)
    cache.commit(lease, path, slots, now=0.0)
    cache.release(lease, now=0.0)


def look(cache, *, max_depth=8, max_nodes=64):
    return cache.outline(max_depth=max_depth, max_nodes=max_nodes)


@pytest.fixture
def cache():
    return TieredCache(CacheConfig(device_blocks=256, block_tokens=BLOCK))


def test_runs_have_their_sizes_parents_and_ages(cache):
    """A shared prefix is one node and its continuations are two; the one used last is the
    youngest."""
    fill(cache, [1] * 8 + [2] * 4)
    fill(cache, [1] * 8 + [3] * 8)

    head, *tails = look(cache).nodes

    assert (head.parent, head.start, head.num_blocks, head.num_children) == (None, 0, 2, 2)
    assert {(node.parent, node.start, node.num_blocks) for node in tails} == {
        (head.uid, 2, 1),
        (head.uid, 2, 2),
    }
    assert [node.age for node in (head, *tails)] == [0, 0, 1]
    assert all(node.device == node.num_blocks and not node.host for node in (head, *tails))


def test_salted_tenants_are_a_sum_and_nothing_else(cache):
    """Lesson 67: neither prefixes nor branches of salted tenants are visible, only totals."""
    fill(cache, [1] * 8, salt="alice")
    fill(cache, [1] * 8 + [2] * 4, salt="bob")

    seen = look(cache)

    assert seen.nodes == []
    assert (seen.apart.num_namespaces, seen.apart.device) == (2, 5)
    assert "alice" not in repr(seen)


def test_an_outline_is_as_small_as_it_was_asked_to_be(cache):
    """Depth and number of nodes are limits, and omitted nodes are counted."""
    for number in range(40):
        fill(cache, [9] * 4 + [number] * 4)
    fill(cache, [7] * 4, salt="x")
    fill(cache, [8] * 4, salt="y")

    assert [node.num_children for node in look(cache, max_depth=1).nodes] == [40]
    few = look(cache, max_nodes=16)
    assert len(few.nodes) == 9  # the head, and its eight newest children
    assert few.num_nodes == 43
    assert {node.age for node in few.nodes[1:]} == set(range(2, 10))
    assert len(look(cache, max_nodes=3).nodes) == 3
    assert not look(cache, max_nodes=1).apart.is_whole
    assert look(cache, max_nodes=2).apart.is_whole


def test_an_empty_cache_has_an_empty_outline(cache):
    """Nothing was cached yet, or everything was forgotten."""
    assert look(cache).nodes == []
    fill(cache, [1] * 8)
    cache.reset()

    seen = look(cache)

    assert (seen.nodes, seen.num_first, seen.generation) == ([], 0, 1)
