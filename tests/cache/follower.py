"""A consumer that knows the cache only from its events."""

from headwater.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.types import BlockKey, Tier


class Follower:
    """The keys in each tier, according to the events."""

    def __init__(self):
        self.tiers: dict[Tier, set[BlockKey]] = {tier: set() for tier in Tier}
        self.tokens: dict[BlockKey, bytes] = {}

    def follow(self, events):
        """Apply events in order; an impossible event fails."""
        for event in events:
            match event:
                case BlocksStored():
                    self.store(event)
                case BlocksRemoved():
                    assert set(event.keys) <= self.tiers[event.tier], (
                        "removed, but never stored"
                    )
                    assert len(set(event.keys)) == len(event.keys), "removed twice"
                    self.tiers[event.tier] -= set(event.keys)
                case BlocksCleared():
                    for keys in self.tiers.values():
                        keys.clear()

    def store(self, event):
        known = set().union(*self.tiers.values())
        assert event.keys, "a event about nothing"
        assert not set(event.keys) & self.tiers[event.tier], "stored twice"
        assert event.parent is None or event.parent in known, "stored without its parent"
        self.tiers[event.tier] |= set(event.keys)
        self.tokens[event.keys[0]] = event.tokens


def cached(cache):
    """The keys in each tier, read from the tree."""
    tiers: dict[Tier, set[BlockKey]] = {tier: set() for tier in Tier}
    for node in cache._tree.nodes():
        keys = cache._tree.keys(node)
        tiers[Tier.DEVICE] |= set(keys[: len(node.device)])
        tiers[Tier.HOST] |= set(keys[: len(node.host)])
        tiers[Tier.STORAGE] |= set(keys[: node.num_stored])
    return tiers
