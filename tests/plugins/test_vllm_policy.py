"""The session policy behind the interface of vLLM's CPU tier."""

import hashlib
import random
from typing import Any

import pytest
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from headwater.clock import VirtualClock
from headwater.plugins.vllm.policy import SessionCachePolicy

TOKENS = 64


class Cache:
    """Serves requests as vLLM's `CPUOffloadingManager` does, with the policy under test."""

    def __init__(self, capacity):
        self.clock = VirtualClock()
        SessionCachePolicy.clock = self.clock
        self.policy = SessionCachePolicy(cache_capacity=capacity)
        self.free = list(range(capacity))
        self.resident = set()
        self.last = 0

    def serve(self, keys):
        """Serve one request; return how many leading chunks it found, or None if there was no
        room."""
        self.clock.advance(1.0)
        self.last += 1
        context = ReqContext(str(self.last))
        for place, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, place * TOKENS)
        found = 0
        while found < len(keys) and self.policy.get(keys[found]) is not None:
            found += 1
        missing = [key for key in keys if self.policy.get(key) is None]
        self.policy.on_store_miss(missing, context)
        needed = len(missing) - len(self.free)
        if needed > 0:
            evicted = self.policy.evict(needed, set(keys))
            if evicted is None:
                return None
            assert len({key for key, _ in evicted}) == needed
            for key, status in evicted:
                self.resident.remove(key)
                self.free.append(status.chunk_id)
        for key in missing:
            self.policy.insert(key, ChunkStatus(self.free.pop()))
        for key in missing:
            stored: Any = self.policy.get(key)
            stored.ref_cnt = 0
            self.policy.mark_evictable(key)
        self.resident.update(missing)
        self.policy.on_request_finished((tuple(keys),), set(missing), set(), context)
        assert all(self.policy.get(key) is not None for key in self.resident)
        return found


@pytest.fixture(autouse=True)
def _real_clock_again():
    before = SessionCachePolicy.clock
    yield
    SessionCachePolicy.clock = before


def make_chunks(count, run="run"):
    hashes = [hashlib.sha256(f"{run} {n}".encode()).digest() for n in range(count)]
    return [make_offload_key(one, 0) for one in hashes]


def test_the_end_of_a_prompt_is_evicted_before_its_start():
    """A chunk is of no use without those before it."""
    cache = Cache(8)
    old = make_chunks(8)
    cache.serve(old)

    cache.serve(make_chunks(3, "new"))

    assert [cache.policy.get(key) is not None for key in old] == [True] * 5 + [False] * 3


def test_protected_and_pinned_chunks_are_never_evicted():
    """Eviction is all or nothing, and changes nothing if it cannot be satisfied."""
    cache = Cache(4)
    keys = make_chunks(4)
    cache.serve(keys)
    cache.policy.mark_non_evictable(keys[3])

    assert cache.policy.evict(2, {keys[0], keys[1]}) is None
    assert all(cache.policy.get(key) is not None for key in keys)
    cache.policy.mark_evictable(keys[3])
    evicted = cache.policy.evict(2, set()) or []
    assert [key for key, _ in evicted] == [keys[3], keys[2]]


def test_a_failed_store_leaves_nothing_behind():
    """A chunk that was inserted and never became ready can be removed and inserted again."""
    cache = Cache(2)
    [key] = make_chunks(1)
    cache.policy.insert(key, ChunkStatus(0))
    cache.policy.remove(key)

    assert cache.policy.get(key) is None
    assert cache.serve([key]) == 0
    assert cache.serve([key]) == 1


def test_sessions_that_return_are_kept_and_one_off_prompts_are_not():
    """After some traffic the policy finds more than an LRU of the same size could."""
    cache, rng = Cache(64), random.Random(3)
    sessions = [make_chunks(8, f"session {n}") for n in range(6)]
    hits = 0
    for turn in range(400):
        for noise in range(4):
            cache.serve(make_chunks(8, f"noise {turn} {noise}"))
        found = cache.serve(sessions[rng.randrange(6)])
        hits += (found or 0) if turn >= 200 else 0

    # An LRU of 64 chunks holds the last eight prompts: one or two turns, of which few return.
    assert hits / (200 * 8) > 0.6


def test_clearing_forgets_every_chunk_even_pinned_ones():
    """vLLM's reset requires that pinned chunks are forgotten, too."""
    cache = Cache(4)
    keys = make_chunks(4)
    cache.serve(keys)
    cache.policy.mark_non_evictable(keys[0])

    cache.policy.clear()

    assert [cache.policy.get(key) for key in keys] == [None] * 4
