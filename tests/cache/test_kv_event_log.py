"""KV events: what each event contains. `test_tiers` applies them through every order of
operations."""

import numpy as np

from headwater.cache import Namespace
from headwater.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.types import Tier
from tests.cache.make import make_cache, make_path, serve


def test_nothing_is_recorded_without_a_follower():
    """A cache that is not followed records no events and computes no keys for them."""
    cache = make_cache()
    serve(cache, make_path(1, 2))

    assert not cache.take_events()
    assert all(node.keys is None for node in cache._tree.nodes())


def test_a_stored_run_has_its_keys_its_tokens_and_its_parent():
    """There is one event per run, with its keys, its tokens and the key before it."""
    cache = make_cache(record_events=True)
    serve(cache, make_path(1, 2))
    serve(cache, make_path(1, 2, 3))
    keys = cache.keys(make_path(1, 2, 3), 3)

    first, second = cache.take_events()

    assert (first.tier, first.keys, first.parent) == (Tier.DEVICE, keys[:2], None)
    assert np.frombuffer(first.tokens, np.int32).tolist() == [1] * 4 + [2] * 4
    assert (second.keys, second.parent) == (keys[2:], keys[1])
    assert not cache.take_events()


def test_an_eviction_is_one_event():
    """All runs evicted together are one event, before the event of the blocks that replace
    them."""
    cache = make_cache(device_blocks=3, record_events=True)
    for number in (1, 2, 3):
        serve(cache, make_path(number))
    cache.take_events()

    serve(cache, make_path(4, 5))

    removed, stored = cache.take_events()
    assert isinstance(removed, BlocksRemoved)
    assert isinstance(stored, BlocksStored)
    assert len(removed.keys) == 2


def test_a_salt_keeps_tokens_private():
    """Lesson 67: events of a salted namespace have keys that only its owner can make, and no
    token ids; the salt itself is nowhere."""
    cache = make_cache(record_events=True)
    serve(cache, make_path(1, 2, namespace=Namespace(salt="tenant")))
    serve(cache, make_path(1, 2))

    salted, plain = cache.take_events()

    assert salted.tokens == b""
    assert plain.tokens != b""
    assert not set(salted.keys) & set(plain.keys)
    assert "tenant" not in repr(salted)
    assert {change.tokens == b"" for change in cache.snapshot_events()} == {True, False}


def test_a_reset_is_one_event():
    """Events that were not taken before the reset are dropped."""
    cache = make_cache(record_events=True)
    serve(cache, make_path(1, 2))

    cache.reset()

    assert list(cache.take_events()) == [BlocksCleared()]
    assert list(cache.snapshot_events()) == []


def test_events_are_true_whatever_happens_before_they_are_read():
    """Another thread builds the events later: the blocks may be gone by then, and others in
    their place."""
    cache = make_cache(device_blocks=6, record_events=True)
    keys = cache.keys(make_path(1, 2, 3), 3)
    serve(cache, make_path(1, 2, 3))
    stored = cache.take_events()
    cache.trim(1)
    removed = cache.take_events()
    serve(cache, make_path(1, 8, 9))
    cache.reset()

    assert [change.keys for change in stored] == [keys]
    assert stored[0].tokens == make_path(1, 2, 3).tokens.tobytes()
    assert [change.keys for change in removed] == [keys[1:]]
