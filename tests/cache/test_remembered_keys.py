"""Block keys are computed once: by a lookup in another thread, or when they are first needed."""

import numpy as np
import pytest

from headwater.cache import (
    CacheConfig,
    JobOutcome,
    JobStatus,
    KeyScheme,
    PathKeys,
    TieredCache,
    TokenPath,
)
from headwater.types import BlockKey, RequestId
from tests.cache.make import note_hashing

BLOCK = 2


@pytest.fixture
def hashed(monkeypatch):
    return note_hashing(monkeypatch)


def _make_cache() -> TieredCache:
    config = CacheConfig(
        device_blocks=32, block_tokens=BLOCK, host_blocks=8, storage=True, record_events=True
    )
    return TieredCache(config)


def _path(num_tokens: int, keys: PathKeys | None = None) -> TokenPath:
    return TokenPath(np.arange(num_tokens, dtype=np.int32), keys=keys)


def _commit(cache: TieredCache, path: TokenPath) -> None:
    lease = cache.lease(cache.match(path), owner=RequestId("r"), now=0.0)
    slots = cache.take(path.num_blocks(BLOCK) - lease.num_blocks, now=0.0)
    assert slots is not None, "the cache is large enough"
    cache.commit(lease, path, slots, now=0.0)
    cache.release(lease, now=0.0)


def _plain_keys(num_tokens: int, scheme: KeyScheme) -> list[BlockKey]:
    return scheme.of_path(_path(num_tokens), num_tokens // BLOCK)


def test_a_commit_uses_the_keys_that_a_lookup_computed(hashed):
    """The loop hashes nothing of a prompt that storage was asked for, although events need keys."""
    cache, keys = _make_cache(), PathKeys()
    plan = cache.plan_lookup([(_path(12, keys), 6)])
    assert hashed == []
    runs = plan.runs()
    cache.finish_job(JobOutcome(job=plan.job, status=JobStatus.DONE, found=(0,)), now=0.0)
    assert hashed == [6]

    _commit(cache, _path(12, keys))
    cache.take_events()

    assert hashed == [6]
    assert cache.keys(_path(12), 6) == runs[0]


def test_a_lookup_computes_only_the_keys_that_no_cached_block_has(hashed):
    """Keys of blocks that are in the tree are taken from there."""
    cache = _make_cache()
    _commit(cache, _path(8))
    hashed.clear()

    runs = cache.plan_lookup([(_path(14), 7)]).runs()

    assert hashed == [3]
    assert runs == [_plain_keys(14, cache._tree.scheme)]


def test_a_second_lookup_of_a_sequence_computes_nothing(hashed):
    """The second lookup of a sequence, perhaps for fewer blocks, finds its keys computed."""
    cache, keys = _make_cache(), PathKeys()
    first = cache.plan_lookup([(_path(12, keys), 6)]).runs()

    second = cache.plan_lookup([(_path(13, keys), 4)]).runs()

    assert hashed == [6]
    assert second == [first[0][:4]]


def test_remembered_keys_of_other_weights_are_not_used():
    """After a reload the same tokens have other keys, also for a path that knew its keys."""
    cache, keys = _make_cache(), PathKeys()
    old = cache.plan_lookup([(_path(8, keys), 4)]).runs()
    other = KeyScheme(block_tokens=BLOCK, fingerprint=b"other")
    cache.rekey(other)

    _commit(cache, _path(8, keys))

    assert cache.keys(_path(8), 4) == _plain_keys(8, other) != old[0]


def test_a_node_with_keys_may_follow_one_without():
    """A path may know its keys only after its first blocks were committed without keys."""
    cache, keys = TieredCache(CacheConfig(device_blocks=32, block_tokens=BLOCK)), PathKeys()
    _commit(cache, _path(8))
    cache._tree.scheme.of_path(_path(16, keys), 8)

    _commit(cache, _path(16, keys))

    tree = cache._tree
    (node,) = [node for node in tree.nodes() if node.end == 8]
    assert tree.key_before(node, 0 if node.start else 4) == _plain_keys(8, tree.scheme)[-1]


def test_media_are_part_of_remembered_keys():
    """Keys computed in two parts equal those computed at once, with media in either part."""
    media = {1: b"cat", 3: b"dog"}
    scheme, keys = KeyScheme(block_tokens=BLOCK), PathKeys()
    tokens = np.arange(10, dtype=np.int32)
    whole = scheme.of_path(TokenPath(tokens, media=media), 5)

    scheme.of_path(TokenPath(tokens, media=media, keys=keys), 2)
    parts = scheme.of_path(TokenPath(tokens, media=media, keys=keys), 5)

    assert parts == whole
    assert whole != scheme.of_path(TokenPath(tokens), 5)
