"""Ids of recently evicted nodes. A node that is created again in the same place has the same
id."""

from collections import OrderedDict

from headwater.cache.node import Node


class Evicted:
    """Remembers nodes by uid, up to `max_blocks` blocks in total; forgets the oldest first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self.blocks = 0

    def add(self, node: Node, num_blocks: int) -> None:
        """Remember that `node` was evicted with this many blocks."""
        self.blocks += num_blocks - self._sizes.pop(node.uid, 0)
        self._sizes[node.uid] = num_blocks
        while self.blocks > self._max_blocks and self._sizes:
            self.blocks -= self._sizes.popitem(last=False)[1]

    def take(self, node: Node) -> bool:
        """Whether `node` is remembered as evicted. Afterwards it is not remembered any more."""
        size = self._sizes.pop(node.uid, None)
        self.blocks -= size or 0
        return size is not None
