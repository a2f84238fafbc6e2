"""S3-FIFO over nodes: a small queue for new nodes, a main queue for nodes that were used again.

A hit only increases a counter. A used node at the head of a queue advances: from the small
queue to the main queue, or from the head of the main queue to its end. It advances when a node
behind it is evicted, so reading the order changes nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from headwater.cache.node import Node
from headwater.cache.plan import Lease
from headwater.cache.policy.base import FinishedRequest, MarkedRun, Orders, Shape
from headwater.cache.policy.evicted import Evicted
from headwater.errors import InvariantError

_SMALL_SHARE = 0.1
_MAX_COUNT = 3


class _Queue:
    """Nodes, first in first out, with the uses of each since it came and its blocks at that
    time."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[Node, tuple[int, int]] = OrderedDict()
        self.blocks = 0

    def push(self, node: Node, count: int) -> None:
        self.nodes[node] = count, node.num_blocks
        self.blocks += node.num_blocks

    def remove(self, node: Node) -> int:
        _, size = self.nodes.pop(node)
        self.blocks -= size
        return size


class S3Fifo:
    """The small queue has a tenth of the blocks. A pinned node keeps its place in its queue."""

    def __init__(self, capacity_blocks: int) -> None:
        self._small = _Queue()
        self._main = _Queue()
        self._away: set[Node] = set()
        """Pinned nodes: in a queue, but not in the order."""
        self._evicted = Evicted(capacity_blocks)

    def visit(self, lease: Lease, finished: FinishedRequest, now: float) -> Sequence[MarkedRun]:
        return ()

    def add(self, node: Node, now: float) -> None:
        queue = self._return(node)
        if queue is None:
            (self._main if self._evicted.take(node) else self._small).push(node, 0)
        else:
            count, size = queue.nodes[node]
            queue.nodes[node] = min(count + 1, _MAX_COUNT), size
        self._forget_gone()

    def add_cold(self, node: Node, now: float) -> None:
        queue = self._return(node)
        if queue is None:
            queue = self._small
            queue.push(node, 0)
        queue.nodes[node] = 0, queue.nodes[node][1]
        queue.nodes.move_to_end(node, last=False)

    def close(self, node: Node) -> None:
        (self._small if node in self._small.nodes else self._main).remove(node)
        self._small.push(node, 0)
        self._small.nodes.move_to_end(node, last=False)

    def discard(self, node: Node) -> None:
        if node not in self:
            raise InvariantError("a node left an eviction order that it was not in")
        self._away.add(node)

    def discard_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node in self._small.nodes:
                self._evicted.add(node, self._small.remove(node))
            else:
                self._main.remove(node)
        self._forget_gone()
        self._promote()

    def victims(self) -> Iterator[Node]:
        kept: list[Node] = []
        small, main = iter(self._small.nodes.items()), iter(self._main.nodes.items())
        left = self._small.blocks
        target = _SMALL_SHARE * (left + self._main.blocks)
        while True:
            entry = next(small, None) if left > target else None
            if entry is not None:
                left -= entry[1][1]
            else:
                entry = next(main, None) or next(small, None)
            if entry is None:
                break
            node, (count, _) = entry
            if node in self._away:
                continue
            if count:
                kept.append(node)
            else:
                yield node
        yield from kept

    def __contains__(self, node: object) -> bool:
        known = node in self._small.nodes or node in self._main.nodes
        return known and node not in self._away

    def _return(self, node: Node) -> _Queue | None:
        """The queue of a node that was pinned; None for a new node."""
        for queue in (self._small, self._main):
            if node in queue.nodes:
                if node not in self._away:
                    raise InvariantError("a node entered the eviction order twice")
                self._away.remove(node)
                return queue
        return None

    def _forget_gone(self) -> None:
        """Remove nodes at the head that left the tree while they were pinned."""
        for queue in (self._small, self._main):
            while queue.nodes and (node := next(iter(queue.nodes))).gone:
                queue.remove(node)
                self._away.discard(node)

    def _promote(self) -> None:
        """Advance used nodes at the head, because a node behind them was evicted."""
        nodes = self._small.nodes
        while nodes and nodes[node := next(iter(nodes))][0]:
            self._small.remove(node)
            self._main.push(node, 0)
        nodes = self._main.nodes
        for _ in range(len(nodes)):
            node = next(iter(nodes))
            count, size = nodes[node]
            if not count:
                break
            nodes[node] = count - 1, size
            nodes.move_to_end(node)


def make_orders(shape: Shape) -> Orders:
    """An S3-FIFO for each tier."""
    return Orders(S3Fifo(shape.device_blocks), S3Fifo(shape.host_blocks))
