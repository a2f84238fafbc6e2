"""Prefixes that a running sequence is computing right now: known, and not yet findable."""

from headwater.cache.keys import TokenPath
from headwater.cache.lease import Lease
from headwater.cache.node import Node
from headwater.cache.plan import InFlight
from headwater.cache.tree import PrefixTree


class Announcements:
    """Who computes what, by place: the node it continues and its next block.

    Where two sequences compute the same blocks, the first to announce is the one named.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._by_place: dict[tuple[Node, bytes], Lease] = {}

    def announce(self, lease: Lease, path: TokenPath) -> None:
        """`lease`'s owner computes the blocks of `path` beyond the lease."""
        self.withdraw(lease)
        if lease.num_blocks < path.num_blocks(self._tree.scheme.block_tokens):
            lease.pending = path
            self._by_place.setdefault(self._place(lease, path), lease)

    def withdraw(self, lease: Lease) -> None:
        """Nothing beyond `lease` is being computed by its owner any more."""
        path = lease.pending
        if path is None:
            return
        lease.pending = None
        place = self._place(lease, path)
        if self._by_place.get(place) is lease:
            del self._by_place[place]

    def find(self, node: Node, path: TokenPath, block: int, max_blocks: int) -> InFlight | None:
        """Who is computing `path` from `block` on, where `node` ends, and how far."""
        if not self._by_place:
            return None
        lease = self._by_place.get((node, self._tree.first(path, block)))
        if lease is None or lease.pending is None:
            return None
        common = self._common(lease.pending, path, block, max_blocks)
        return InFlight(lease.owner, common)

    def clear(self) -> None:
        """Forget all: the tree they refer to is gone."""
        for lease in self._by_place.values():
            lease.pending = None
        self._by_place.clear()

    def _place(self, lease: Lease, path: TokenPath) -> tuple[Node, bytes]:
        return lease.node, self._tree.first(path, lease.num_blocks)

    def _common(self, theirs: TokenPath, mine: TokenPath, block: int, max_blocks: int) -> int:
        """Blocks from `block` on that are the same in both paths."""
        end = min(theirs.num_blocks(self._tree.scheme.block_tokens), max_blocks)
        first = self._tree.first
        same = (first(theirs, at) == first(mine, at) for at in range(block, end))
        return next((i for i, equal in enumerate(same) if not equal), end - block)
