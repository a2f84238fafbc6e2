"""Records what the cache gains and loses, tier by tier, for those who follow it from outside.

Pure: facts pile up until they are taken, in the order in which they became true. A cache that
nobody follows has no recorder and computes no key for this.
"""

from collections.abc import Iterator

from headwater.cache.keys import SHARED, Namespace
from headwater.cache.node import Node
from headwater.cache.tree import PrefixTree
from headwater.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from headwater.types import Tier


class KVEventLog:
    """The changes since the last `take`, and the whole state on request."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._events: list[CacheEvent] = []

    def stored(self, node: Node, tier: Tier, start: int, end: int) -> None:
        """Blocks [start, end) of the run of `node` are in `tier` from now on."""
        if start < end:
            self._events.append(self._stored(node, tier, start, end))

    def removed(self, node: Node, tier: Tier, start: int, end: int) -> None:
        """Blocks [start, end) of the run of `node` have left `tier`; their keys are known, for
        they were told when they came."""
        if start >= end:
            return
        keys = self._tree.keys(node)[start:end]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and last.tier is tier:
            last.keys.extend(keys)  # an eviction is one fact; nobody has seen it yet
        else:
            self._events.append(BlocksRemoved(tier=tier, keys=keys))

    def cleared(self) -> None:
        """Nothing is cached any more; what was not told yet need not be."""
        self._events = [BlocksCleared()]

    def take(self) -> list[CacheEvent]:
        """What happened since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    def snapshot(self) -> Iterator[BlocksStored]:
        """All that is cached now, parents before children. O(everything)."""
        for node in self._tree.nodes():
            lengths = (len(node.device), len(node.host), node.num_stored)
            for tier, count in zip(Tier, lengths, strict=True):
                if count:
                    yield self._stored(node, tier, 0, count)

    def _stored(self, node: Node, tier: Tier, start: int, end: int) -> BlocksStored:
        namespace, stride = _namespace(node), self._tree.stride
        is_first = node.start + start == 0
        return BlocksStored(
            tier=tier,
            keys=self._tree.keys(node)[start:end],
            parent=None if is_first else self._tree.key_before(node, start),
            tokens=b"" if namespace.salt else node.tokens[start * stride : end * stride],
            adapter=namespace.adapter,
        )


def _namespace(node: Node) -> Namespace:
    """Whose block it is: what the root of its path says."""
    while node.parent is not None:
        node = node.parent
    return node.namespace or SHARED
