"""Records which blocks the cache gains and loses, by tier, for subscribers of KV events.

Pure: events accumulate, in the order in which they happened, until they are taken. Without a
subscriber there is no log, and no key is computed for it.
"""

from collections.abc import Iterator

from headwater.cache.keys import SHARED
from headwater.cache.node import Node
from headwater.cache.tree import PrefixTree, namespace_of
from headwater.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from headwater.types import Tier


class KVEventLog:
    """The changes since the last `take`, and a snapshot on request."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._events: list[CacheEvent] = []
        self._last: BlocksRemoved | None = None
        """The last event, if blocks were removed by it."""

    def stored(self, node: Node, tier: Tier, start: int, end: int) -> None:
        """Blocks [start, end) of `node` are in `tier` from now on."""
        if start < end:
            self._events.append(self._stored(node, tier, start, end))
            self._last = None

    def removed(self, node: Node, tier: Tier, start: int, end: int) -> None:
        """Blocks [start, end) of `node` have left `tier`. Their keys are known, because they were
        computed when the blocks were recorded as stored."""
        if start >= end:
            return
        keys = node.keys
        if keys is None or len(keys) < end:
            keys = self._tree.keys(node)
        last = self._last
        if last is not None and last.tier is tier:
            # One event per eviction: this one was not taken yet.
            last.keys.extend(keys[start:end])
        else:
            self._last = BlocksRemoved(tier=tier, keys=keys[start:end])
            self._events.append(self._last)

    def cleared(self) -> None:
        """Nothing is cached any more. Events that were not taken yet are dropped."""
        self._events, self._last = [BlocksCleared()], None

    def take(self) -> list[CacheEvent]:
        """The events since the last call, in order."""
        taken, self._events, self._last = self._events, [], None
        return taken

    def snapshot(self) -> Iterator[BlocksStored]:
        """Every block that is cached now, parents before children. O(blocks)."""
        for node in self._tree.nodes():
            lengths = (len(node.device), len(node.host), node.num_stored)
            for tier, count in zip(Tier, lengths, strict=True):
                if count:
                    yield self._stored(node, tier, 0, count)

    def _stored(self, node: Node, tier: Tier, start: int, end: int) -> BlocksStored:
        tree, stride = self._tree, self._tree.stride
        keys, parent = node.keys, None
        if keys is None or len(keys) < end:
            keys = tree.keys(node)
        if start:
            parent = keys[start - 1]
        elif node.start:
            parent = tree.key_before(node, 0)
        event = BlocksStored(
            tier=tier,
            keys=keys[start:end],
            parent=parent,
            tokens=node.tokens[start * stride : end * stride],
        )
        namespace = namespace_of(node)
        if namespace is not SHARED:
            event.adapter = namespace.adapter
            if namespace.salt:
                event.tokens = b""
                event.salt_id = tree.scheme.root(namespace)[-8:].hex()
        return event
