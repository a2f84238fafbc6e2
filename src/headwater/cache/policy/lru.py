"""Least recently used first: the default policy, and the baseline for all others."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from headwater.cache.node import Node
from headwater.cache.plan import Lease
from headwater.cache.policy.base import FinishedRequest, MarkedRun, Orders, Shape
from headwater.errors import InvariantError


class Lru:
    """Least recently used first. Adding and discarding are O(1) for any number of nodes.

    A path is added deepest node first, so a node comes before its parent.
    """

    def __init__(self) -> None:
        order: OrderedDict[Node, None] = OrderedDict()
        self._order = order
        # Methods of the dictionary itself, because these are called for every node of a request.
        self.discard: Callable[[Node], None] = order.__delitem__
        self.victims: Callable[[], Iterator[Node]] = order.__iter__

    def visit(self, lease: Lease, finished: FinishedRequest, now: float) -> Sequence[MarkedRun]:
        return ()

    def add(self, node: Node, now: float) -> None:
        if node in self._order:
            raise InvariantError("a node entered the eviction order twice")
        self._order[node] = None

    def add_cold(self, node: Node, now: float) -> None:
        self.add(node, now)
        self._order.move_to_end(node, last=False)

    def close(self, node: Node) -> None:
        self._order.move_to_end(node, last=False)

    def discard_all(self, nodes: Iterable[Node]) -> None:
        order = self._order
        for node in nodes:
            del order[node]

    def __contains__(self, node: object) -> bool:
        return node in self._order


def make_orders(shape: Shape) -> Orders:
    """An LRU for each tier."""
    return Orders(Lru(), Lru())
