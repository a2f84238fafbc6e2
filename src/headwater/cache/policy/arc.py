"""ARC over nodes: one list for nodes used once, one for nodes used again, and an adaptive
border.

A miss on a node that was evicted from one of the two lists makes that list longer.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from headwater.cache.node import Node, RetentionMark
from headwater.cache.plan import Lease
from headwater.cache.policy.base import FinishedRequest, MarkedRun, Orders, Shape
from headwater.cache.policy.evicted import Evicted
from headwater.errors import InvariantError
from headwater.types import Tier


class _Recent:
    """Nodes, least recently used first, with their number of blocks when added; and evicted
    nodes."""

    def __init__(self, capacity_blocks: int) -> None:
        self.sizes: OrderedDict[Node, int] = OrderedDict()
        self.blocks = 0
        self.evicted = Evicted(capacity_blocks)

    def push(self, node: Node) -> None:
        self.sizes[node] = node.num_blocks
        self.blocks += node.num_blocks

    def remove(self, node: Node) -> int:
        size = self.sizes.pop(node)
        self.blocks -= size
        return size


class Arc:
    """Evicts blocks of `once` beyond `border` first, then those of `again`."""

    def __init__(self, capacity_blocks: int, tier: Tier) -> None:
        self._capacity = capacity_blocks
        # Both tiers mark a node that they have seen; each has its own bit.
        self._bit = 1 << tier
        self._once = _Recent(capacity_blocks)
        self._again = _Recent(capacity_blocks)
        self._border = 0.0

    def visit(self, lease: Lease, finished: FinishedRequest, now: float) -> Sequence[MarkedRun]:
        return ()

    def add(self, node: Node, now: float) -> None:
        if node in self:
            raise InvariantError("a node entered the eviction order twice")
        seen = node.mark.run_class if node.mark is not None else 0
        if seen & self._bit:
            self._again.push(node)
            return
        node.mark = RetentionMark(now, seen | self._bit)
        missed = self._once.evicted, self._again.evicted
        if missed[0].take(node):
            self._move_border(node.num_blocks, missed[1].blocks, missed[0].blocks)
        elif missed[1].take(node):
            self._move_border(-node.num_blocks, missed[0].blocks, missed[1].blocks)
        else:
            self._once.push(node)
            return
        self._again.push(node)

    def add_cold(self, node: Node, now: float) -> None:
        if node in self:
            raise InvariantError("a node entered the eviction order twice")
        self._once.push(node)
        self._once.sizes.move_to_end(node, last=False)

    def close(self, node: Node) -> None:
        self.discard(node)
        self._once.push(node)
        self._once.sizes.move_to_end(node, last=False)

    def discard(self, node: Node) -> None:
        (self._once if node in self._once.sizes else self._again).remove(node)

    def discard_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            recent = self._once if node in self._once.sizes else self._again
            recent.evicted.add(node, recent.remove(node))

    def victims(self) -> Iterator[Node]:
        once, again = iter(self._once.sizes.items()), iter(self._again.sizes.items())
        left = self._once.blocks
        while True:
            entry = next(once, None) if left > self._border else None
            if entry is not None:
                left -= entry[1]
            else:
                entry = next(again, None) or next(once, None)
            if entry is None:
                return
            yield entry[0]

    def __contains__(self, node: object) -> bool:
        return node in self._once.sizes or node in self._again.sizes

    def _move_border(self, num_blocks: int, others: int, own: int) -> None:
        """Move the border by `num_blocks`, which is negative in favour of `again`. Of the two
        lists, one had evicted the blocks that are missed now. The border moves further if that
        list remembers fewer evicted blocks (`own`) than the other one (`others`)."""
        step = num_blocks * max(1.0, others / max(own, 1))
        self._border = min(max(self._border + step, 0.0), float(self._capacity))


def make_orders(shape: Shape) -> Orders:
    """An ARC for each tier."""
    return Orders(Arc(shape.device_blocks, Tier.DEVICE), Arc(shape.host_blocks, Tier.HOST))
