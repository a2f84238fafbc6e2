"""Which node is evicted first. A policy is an order; how much goes is the evictor's business.

A node is in the order exactly while it may be evicted: it has blocks in this tier and nobody
has pinned it. The evictor takes a node only when its children are gone from the tier, so a
policy may offer a parent before its child; it is then passed over until its turn comes.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from headwater.cache.node import Node
from headwater.errors import InvariantError


class EvictionPolicy(Protocol):
    """An order over the evictable nodes of one tier. Called by the decider thread only."""

    def add(self, node: Node, now: float) -> None:
        """`node` became evictable after being used: last in the order."""

    def add_cold(self, node: Node, now: float) -> None:
        """`node` became evictable again without being used: first in the order."""

    def discard(self, node: Node) -> None:
        """`node` is pinned, or has no blocks here any more."""

    def discard_all(self, nodes: Iterable[Node]) -> None:
        """The same for many: those evicted in one batch."""

    def victims(self) -> Iterator[Node]:
        """The nodes, first to go first. The order does not change while this is read."""

    def __contains__(self, node: object) -> bool:
        """Whether `node` is in the order; for checks."""


class Lru:
    """Least recently used first. Adding and discarding are O(1), whatever the number of nodes.

    A path is added deepest node first, so a node comes before its parent.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node, now: float) -> None:
        if node in self._order:
            raise InvariantError("a node entered the eviction order twice")
        self._order[node] = None

    def add_cold(self, node: Node, now: float) -> None:
        self.add(node, now)
        self._order.move_to_end(node, last=False)

    def discard(self, node: Node) -> None:
        del self._order[node]

    def discard_all(self, nodes: Iterable[Node]) -> None:
        order = self._order
        for node in nodes:
            del order[node]

    def victims(self) -> Iterator[Node]:
        return iter(self._order)

    def __contains__(self, node: object) -> bool:
        return node in self._order


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": Lru}
"""Every policy by the name it has in settings."""
