"""The cache has the same hits and victims, block for block, as a plain dict of blocks."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from headwater.cache import CacheConfig, TieredCache, TokenPath
from headwater.types import RequestId
from tests.cache.naive import NaiveLru
from tests.search import search

BLOCK, CAPACITY = 2, 9
# Few different tokens, so that prompts share prefixes and diverge inside runs.
prompts = st.lists(st.integers(0, 1), min_size=0, max_size=14)


class LruMachine(RuleBasedStateMachine):
    """One tier: any order of overlapping requests evicts exactly what LRU evicts."""

    running = Bundle("running")

    def __init__(self):
        super().__init__()
        config = CacheConfig(block_tokens=BLOCK, device_blocks=CAPACITY, max_ghosts=4)
        self.cache = TieredCache(config)
        self.model = NaiveLru(CAPACITY, BLOCK)
        self.num_leases = 0

    @rule(target=running, tokens=prompts)
    def start(self, tokens):
        """Match, lease, take the missing blocks; a prompt that does not fit is rolled back."""
        path = TokenPath(tokens)
        blocks = self.model.blocks(tokens)
        match = self.cache.match(path)
        found = self.model.match(tokens, len(blocks))
        assert match.device_blocks == match.num_blocks == found
        lease = self.cache.lease(match, owner=RequestId("r"), now=0.0)
        self.model.lease(blocks[:found])
        slots = self.cache.take(len(blocks) - found, now=0.0)
        if not self.model.take(len(blocks) - found):
            assert slots is None
            self.cache.release(lease, now=0.0)
            self.model.release(blocks[:found], 0)
            return multiple()
        assert slots is not None
        return (lease, path, blocks, slots, found)

    @rule(target=running, request=consumes(running), share=st.floats(0, 1))
    def commit(self, request, share):
        """Publish some held blocks; blocks published meanwhile by others are surplus."""
        lease, path, blocks, slots, done = request
        count = round((len(blocks) - done) * share)
        surplus = self.cache.commit(lease, path, slots[:count], now=0.0)
        assert len(surplus) == self.model.commit(blocks[done : done + count])
        rest = np.concatenate((slots[count:], surplus))
        if len(surplus):
            # The surplus is at the end now, so such a request commits no more and ends.
            self.cache.release(lease, now=0.0, slots=rest)
            self.model.release(blocks[: done + count], len(rest))
            return multiple()
        return (lease, path, blocks, rest, done + count)

    @rule(request=consumes(running))
    def finish(self, request):
        lease, _, blocks, slots, done = request
        self.cache.release(lease, now=0.0, slots=slots)
        self.model.release(blocks[:done], len(slots))

    @rule(tokens=prompts, limit=st.integers(0, 8))
    def probe(self, tokens, limit):
        """Lesson 12: probes do not pin, and find exactly the cached blocks."""
        match = self.cache.match(TokenPath(tokens), limit)
        assert match.num_blocks == self.model.match(tokens, limit)

    @invariant()
    def same_blocks(self):
        self.cache.check()
        cached = set()
        for node in self.cache._tree.nodes():
            for block in range(node.num_blocks):
                cached.add(prefix_of(node, block))
        assert cached == set(self.model.last_use)


def prefix_of(node, block):
    """The tokens from the root to the end of block `block` of `node`."""
    run = np.frombuffer(node.tokens, dtype=np.int32)[: (block + 1) * BLOCK].tolist()
    if node.parent.parent is None:
        return tuple(run)
    return prefix_of(node.parent, node.parent.num_blocks - 1) + tuple(run)


LruMachine.TestCase.settings = search(examples=120, steps=40)
TestLruMachine = LruMachine.TestCase
