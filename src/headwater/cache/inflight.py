"""Prefixes that a running sequence is computing right now: known, and not yet findable."""

from headwater.cache.keys import TokenPath
from headwater.cache.lease import Lease
from headwater.cache.node import Node
from headwater.cache.plan import InFlight
from headwater.cache.tree import PrefixTree


class InFlightPrefixes:
    """Who computes what, by place: the node it continues and its next block.

    Where two sequences compute the same blocks, the first to announce is the one named.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.by_place: dict[tuple[Node, bytes], Lease] = {}

    def announce(self, lease: Lease, path: TokenPath) -> None:
        """`lease`'s owner computes the blocks of `path` beyond the lease."""
        if lease.place is not None:
            self.withdraw(lease)
        if lease.num_blocks < path.num_blocks(self._tree.scheme.block_tokens):
            lease.pending = path
            lease.place = (lease.node, self._tree.first(path, lease.num_blocks))
            self.by_place.setdefault(lease.place, lease)

    def withdraw(self, lease: Lease) -> None:
        """Nothing beyond `lease` is being computed by its owner any more."""
        place = lease.place
        if place is not None:
            lease.pending = lease.place = None
            if self.by_place.get(place) is lease:
                del self.by_place[place]

    def find(
        self, node: Node, first: bytes, path: TokenPath, max_blocks: int
    ) -> InFlight | None:
        """Who is computing the block `first` of `path`, which follows `node`, and how far."""
        lease = self.by_place.get((node, first))
        if lease is None or lease.pending is None:
            return None
        return InFlight(lease.owner, self._common(lease.pending, path, node.end, max_blocks))

    def clear(self) -> None:
        """Forget all: the tree they refer to is gone."""
        for lease in self.by_place.values():
            lease.pending = lease.place = None
        self.by_place.clear()

    def _common(self, theirs: TokenPath, mine: TokenPath, block: int, max_blocks: int) -> int:
        """Blocks from `block` on that are the same in both paths."""
        end = min(theirs.num_blocks(self._tree.scheme.block_tokens), max_blocks)
        first = self._tree.first
        same = (first(theirs, at) == first(mine, at) for at in range(block, end))
        return next((i for i, equal in enumerate(same) if not equal), end - block)
