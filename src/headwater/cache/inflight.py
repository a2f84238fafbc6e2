"""Prefixes that running sequences are computing now: announced, but not findable yet."""

import numpy as np

from headwater.cache.keys import TokenPath
from headwater.cache.node import Node
from headwater.cache.plan import InFlight, Lease
from headwater.cache.tree import PrefixTree


class InFlightPrefixes:
    """Which lease computes what, by place: the node it continues and its next block.

    If two sequences compute the same blocks, a match names the first that announced them.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.by_place: dict[tuple[Node, bytes], Lease] = {}

    def announce(self, lease: Lease, path: TokenPath) -> None:
        """The owner of `lease` computes the blocks of `path` after the leased ones."""
        if lease.place is not None:
            self.withdraw(lease)
        if lease.num_blocks < path.num_blocks(self._tree.scheme.block_tokens):
            lease.pending = path
            lease.place = (lease.node, self._tree.first(path, lease.num_blocks))
            self.by_place.setdefault(lease.place, lease)

    def withdraw(self, lease: Lease) -> None:
        """The owner of `lease` computes nothing after the leased blocks any more."""
        place = lease.place
        if place is not None:
            lease.pending = lease.place = None
            if self.by_place.get(place) is lease:
                del self.by_place[place]

    def find(
        self, node: Node, first: bytes, path: TokenPath, max_blocks: int
    ) -> InFlight | None:
        """Which sequence computes the block `first` of `path` after `node`, and how many more
        blocks of `path` it computes."""
        lease = self.by_place.get((node, first))
        if lease is None or lease.pending is None:
            return None
        return InFlight(lease.owner, self._common(lease.pending, path, node.end, max_blocks))

    def clear(self) -> None:
        """Forget all announcements: the tree they refer to is empty."""
        for lease in self.by_place.values():
            lease.pending = lease.place = None
        self.by_place.clear()

    def _common(self, theirs: TokenPath, mine: TokenPath, block: int, max_blocks: int) -> int:
        """How many blocks, from `block` on, are equal in both paths.

        One numpy comparison: block by block, a prompt of 128k tokens would take 16 ms.
        """
        size = self._tree.scheme.block_tokens
        end = min(theirs.num_blocks(size), max_blocks)
        differs = (
            theirs.tokens[block * size : end * size] != mine.tokens[block * size : end * size]
        )
        first = int(np.argmax(differs)) if differs.any() else len(differs)
        count = first // size
        if theirs.media is not None or mine.media is not None:
            a, b = theirs.media or {}, mine.media or {}
            touched = (
                i for i in {*a, *b} if block <= i < block + count and a.get(i) != b.get(i)
            )
            count = min(touched, default=block + count) - block
        return count
