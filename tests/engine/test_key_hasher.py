"""Keys of new prompts are computed ahead, in another thread."""

import threading

import numpy as np

from headwater.cache import CacheConfig, TieredCache, TokenPath
from headwater.clock import VirtualClock
from headwater.engine.core import EngineCore
from headwater.engine.key_hasher import KeyHasher
from headwater.events import BlocksStored
from headwater.native import block_keys
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.scheduler import Scheduler
from headwater.testing.runners import EchoRunner
from headwater.types import RequestId
from tests.cache.make import note_hashing
from tests.scheduler.harness import make_prompt, make_request

_TIMEOUT_S = 60.0


def test_the_loop_hashes_no_block_of_a_prompt_that_was_hashed_ahead(monkeypatch):
    """KV events of a prompt need its keys; the loop finds them computed."""
    threads = []
    done = threading.Event()
    real = block_keys.chain

    def noting(parent, tokens, stride):
        threads.append((threading.current_thread().name, len(tokens) // stride))
        done.set()
        return real(parent, tokens, stride)

    monkeypatch.setattr(block_keys, "chain", noting)
    cache = TieredCache(CacheConfig(device_blocks=32, block_tokens=4, record_events=True))
    scheduler = Scheduler(SchedulerConfig(max_model_len=100), cache)
    core = EngineCore(scheduler, EchoRunner(num_blocks=32, block_tokens=4), VirtualClock())
    core.hasher = KeyHasher(cache)
    core.add(make_request("a", make_prompt(22), max_tokens=2))
    core.hasher.close()
    core.hasher._thread.join(_TIMEOUT_S)
    assert done.is_set()

    while core.has_work:
        core.step()

    assert threads == [("key-hasher", 5)]
    path = TokenPath(np.array(make_prompt(22), dtype=np.int32))
    (stored, *_) = cache.take_events()
    assert isinstance(stored, BlocksStored)
    assert stored.keys == cache.scheme.of_path(path, 5)
    core.close()


def test_keys_of_cached_blocks_are_not_computed_again(monkeypatch):
    """The next turn of a conversation hashes its new blocks only; the same prompt hashes none."""
    hashed = note_hashing(monkeypatch)
    cache = TieredCache(CacheConfig(device_blocks=8, block_tokens=4, record_events=True))
    first, longer = make_prompt(12), make_prompt(20)
    path = TokenPath(np.array(first, dtype=np.int32))
    lease = cache.lease(cache.match(path), owner=RequestId("r"), now=0.0)
    slots = cache.take(3, now=0.0)
    assert slots is not None
    cache.commit(lease, path, slots, now=0.0)
    hashed.clear()

    hasher = KeyHasher(cache)
    hasher.hash_ahead(TokenPath(np.array(first, dtype=np.int32)))
    hasher.hash_ahead(TokenPath(np.array(longer, dtype=np.int32)))
    hasher.close()
    hasher._thread.join(_TIMEOUT_S)

    assert hashed == [2]


def test_an_engine_without_hashing_ahead_computes_the_same_keys():
    """A key that is not there in time is computed by the loop."""
    events = []
    for ahead in (False, True):
        cache = TieredCache(CacheConfig(device_blocks=8, block_tokens=4, record_events=True))
        path = TokenPath(np.arange(9, dtype=np.int32))
        if ahead:
            cache.scheme.of_path(path, 2)
        lease = cache.lease(cache.match(path), owner=RequestId("r"), now=0.0)
        slots = cache.take(2, now=0.0)
        assert slots is not None
        cache.commit(lease, path, slots, now=0.0)
        events.append(list(cache.take_events()))

    assert events[0] == events[1]
