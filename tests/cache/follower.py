"""Somebody outside who knows the cache from its facts alone."""

from headwater.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.types import BlockKey, Tier


class Follower:
    """The keys in each tier, as they were told."""

    def __init__(self):
        self.tiers: dict[Tier, set[BlockKey]] = {tier: set() for tier in Tier}
        self.tokens: dict[BlockKey, bytes] = {}

    def follow(self, facts):
        """Apply facts in order; what makes no sense fails."""
        for fact in facts:
            match fact:
                case BlocksStored():
                    self.store(fact)
                case BlocksRemoved():
                    assert set(fact.keys) <= self.tiers[fact.tier], "removed, but never stored"
                    assert len(set(fact.keys)) == len(fact.keys), "removed twice"
                    self.tiers[fact.tier] -= set(fact.keys)
                case BlocksCleared():
                    for keys in self.tiers.values():
                        keys.clear()

    def store(self, fact):
        known = set().union(*self.tiers.values())
        assert fact.keys, "a fact about nothing"
        assert not set(fact.keys) & self.tiers[fact.tier], "stored twice"
        assert fact.parent is None or fact.parent in known, "stored without its parent"
        self.tiers[fact.tier] |= set(fact.keys)
        self.tokens[fact.keys[0]] = fact.tokens


def cached(cache):
    """The truth: the keys in each tier, read from the tree."""
    tiers: dict[Tier, set[BlockKey]] = {tier: set() for tier in Tier}
    for node in cache.tree.nodes():
        keys = cache.tree.keys(node)
        tiers[Tier.DEVICE] |= set(keys[: len(node.device)])
        tiers[Tier.HOST] |= set(keys[: len(node.host)])
        tiers[Tier.STORAGE] |= set(keys[: node.num_stored])
    return tiers
