"""The session policy: least hit density first. See docs/eviction.md for what that means.

All nodes of one class and age bin have the same density, so they share a queue, oldest first,
and the order is an order of queues. A node changes queue when it gets older than its bin; when
densities change, no node is touched.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from headwater.cache.lease import Lease
from headwater.cache.node import Mark, Node
from headwater.cache.policy.base import Run, Turn
from headwater.cache.policy.hazard import EDGES, NUM_BINS, ROW
from headwater.cache.policy.retention import Retention
from headwater.errors import InvariantError
from headwater.types import Tier


class Session:
    """Least hit density first, leaves before what they hang on.

    `cautious` is what the guard may set: the order is then that of an LRU.
    """

    def __init__(self, retention: Retention, tier: Tier) -> None:
        self._retention = retention
        self._parks = tier is Tier.DEVICE
        self._order: OrderedDict[Node, int] = OrderedDict()
        """Least recently used first; the place of each node: its class * ROW + its bin."""
        self._queues: dict[int, OrderedDict[Node, None]] = {}
        self._heap: list[tuple[float, int]] = []
        """Every queue that is not empty, by density; and some that are, or were denser."""
        self._parked: dict[Node, None] = {}
        """Nodes that were least, and have children on the device."""
        self._timers: list[deque[tuple[float, Node]]] = [deque() for _ in range(NUM_BINS)]
        """Nodes in each bin, oldest first, and when they were used."""
        self._timers.append(deque(maxlen=0))
        self._aged_s = 0.0
        self._version = 0
        self.cautious = False

    def visit(self, lease: Lease, turn: Turn, now: float) -> Sequence[Run]:
        return self._retention.visit(lease, turn, now)

    def add(self, node: Node, now: float) -> None:
        if node in self._order:
            raise InvariantError("a node entered the eviction order twice")
        mark = node.mark
        if mark is None:
            mark = node.mark = Mark(now, self._retention.unknown)
        age_bin = 0 if mark.used_s >= now else bisect_right(EDGES, now - mark.used_s) - 1
        self._put(node, mark, min(age_bin, NUM_BINS))

    def add_cold(self, node: Node, now: float) -> None:
        self.add(node, now)
        self._order.move_to_end(node, last=False)
        self._queues[self._order[node]].move_to_end(node, last=False)

    def discard(self, node: Node) -> None:
        place = self._order.pop(node)
        if node in self._parked:
            del self._parked[node]
        else:
            del self._queues[place][node]

    def discard_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.discard(node)
            self._unpark(node.parent)

    def victims(self) -> Iterator[Node]:
        if self.cautious:
            return iter(self._order)
        return self._least_first()

    def __contains__(self, node: object) -> bool:
        return node in self._order

    def _least_first(self) -> Iterator[Node]:
        """Offered nodes leave their queue, and are back in it when the reader is done."""
        self._grow_older()
        if self._version != self._retention.version:
            self._sort_queues()
        offered: list[Node] = []
        try:
            while (node := self._pop_least()) is not None:
                offered.append(node)
                yield node
                self._unpark(node.parent)
            yield from list(self._parked)
        finally:
            for node in reversed(offered):
                self._enqueue(node, self._order[node], first=True)

    def _pop_least(self) -> Node | None:
        """Take the oldest node of the least dense queue out of it, parking what is blocked."""
        heap, queues = self._heap, self._queues
        while heap:
            queue = queues[heap[0][1]]
            if not queue:
                heappop(heap)
                continue
            node, _ = queue.popitem(last=False)
            if not (self._parks and node.device_children):
                return node
            self._parked[node] = None
        return None

    def _unpark(self, node: Node | None) -> None:
        """Back into its queue, once nothing hangs on it any more."""
        if node in self._parked and not node.device_children:
            del self._parked[node]
            self._enqueue(node, self._order[node])

    def _put(self, node: Node, mark: Mark, age_bin: int) -> None:
        place = mark.run_class * ROW + age_bin
        self._order[node] = place
        self._enqueue(node, place)
        self._timers[age_bin].append((mark.used_s, node))

    def _enqueue(self, node: Node, place: int, *, first: bool = False) -> None:
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = OrderedDict()
        if not queue:
            heappush(self._heap, (self._retention.hazards.densities.item(place), place))
        queue[node] = None
        if first:
            queue.move_to_end(node, last=False)

    def _grow_older(self) -> None:
        """Move every node that is older than its bin to the next queue of its class."""
        now, order = self._retention.now, self._order
        if now == self._aged_s:
            return
        self._aged_s = now
        for age_bin, timers in enumerate(self._timers[:-1]):
            until = now - EDGES[age_bin + 1]
            while timers and timers[0][0] <= until:
                timer = timers.popleft()
                node = timer[1]
                place = order.get(node, -1)
                # Used again, or gone since: then it has another timer, or needs none.
                if place % ROW == age_bin and node.mark.used_s == timer[0]:  # type: ignore[union-attr]  # in the order, so marked
                    self._timers[age_bin + 1].append(timer)
                    order[node] = place + 1
                    if node not in self._parked:
                        del self._queues[place][node]
                        self._enqueue(node, place + 1)

    def _sort_queues(self) -> None:
        """Densities changed: sort the queues that are not empty, and forget the others."""
        densities = self._retention.hazards.densities
        self._queues = {place: queue for place, queue in self._queues.items() if queue}
        self._heap = [(densities.item(place), place) for place in self._queues]
        heapify(self._heap)
        self._version = self._retention.version
