"""The session policy: lowest hit density first; docs/eviction.md explains it.

All nodes of one class and age bin have the same density, so they share a queue, oldest first,
and the order is an order of queues. A node changes its queue when it becomes older than its
bin. When densities change, no node is touched. A node that leaves a queue early stays in it as
a stale entry.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, count, pairwise

from headwater.cache.node import Node, RetentionMark
from headwater.cache.plan import Lease
from headwater.cache.policy.base import FinishedRequest, MarkedRun
from headwater.cache.policy.hazard import EDGES, NUM_BINS, ROW
from headwater.cache.policy.retention import Retention
from headwater.cache.policy.weights import Weights
from headwater.errors import InvariantError
from headwater.types import Tier

_MIN_SWEEP = 1024

_WANTED_BINS = bisect_left(EDGES, 105)
"""A node that a waiting request will use ranks by its own class again after this many bins, in
case the request was aborted. The cache is told once, when the request comes near the head of the
queue; with 60 s, many of the requests had not started yet."""


class _Entry:
    """A node in a queue. The entry is current while the order has this entry for the node and
    the entry's place is that of the queue; otherwise it is stale."""

    __slots__ = ("node", "place", "used_s")

    def __init__(self, node: Node, used_s: float, place: int) -> None:
        self.node = node
        self.used_s = used_s
        self.place = place
        """Class * ROW + bin."""


class SessionPolicy:
    """Lowest hit density first; children before their parents.

    While `cautious` is set (by the guard), or too little was learned, the order is that of an
    LRU.
    """

    def __init__(self, retention: Retention, tier: Tier) -> None:
        self._retention = retention
        self._on_device = tier is Tier.DEVICE
        self._order: dict[Node, _Entry | None] = {}
        """All nodes; parked nodes have no entry."""
        self._recent: OrderedDict[Node, None] = OrderedDict()
        """Nodes that are not set aside, least recently used first."""
        self._aside: OrderedDict[Node, None] = OrderedDict()
        """Nodes that an eviction passed over because a client expects to use them again, in the
        order in which it passed over them."""
        self._ends: list[tuple[float, int, Node]] = []
        """Heap of the times when nodes are not expected any more. Nodes that are not set aside
        any more are skipped."""
        self._numbers = count()
        self._queues: dict[int, deque[_Entry]] = {}
        self._heap: list[tuple[float, int]] = []
        """All queues that are not empty, sorted by density. It may also contain empty queues
        and queues with an old, higher density."""
        self._parked: dict[Node, None] = {}
        """Nodes with children on the device. They must follow their children, so they are in no
        queue and do not age."""
        self._timers: list[deque[_Entry]] = [deque() for _ in range(NUM_BINS)]
        """Entries in each bin, oldest first."""
        self._timers.append(deque(maxlen=0))
        self._entered = 0
        """Entries made since the last sweep."""
        self.resident_blocks = 0
        """Blocks of all nodes in the order at the last sweep: what the tier holds."""
        self._aged_s = 0.0
        self._version = 0
        self.cautious = False

    def learned(self) -> Weights:
        """What all tiers together learned so far."""
        return self._retention.learned()

    def visit(self, lease: Lease, finished: FinishedRequest, now: float) -> Sequence[MarkedRun]:
        return self._retention.visit(lease, finished, now)

    def add(self, node: Node, now: float) -> None:
        self._require_new(node)
        self._recent[node] = None
        if self._on_device and node.device_children:
            self._park(node)
            return
        self._enqueue(self._enter(node, now))
        if self._entered > self._max_entered():
            self._grow_older()
            self._sweep()

    def add_cold(self, node: Node, now: float) -> None:
        self._require_new(node)
        if self._on_device and node.device_children:
            self._park(node)
        else:
            self._enqueue(self._enter(node, now), first=True)
        self._move_first(node)

    def close(self, node: Node) -> None:
        used_s = self._retention.now if node.mark is None else node.mark.used_s
        node.mark = RetentionMark(used_s, self._retention.closed)
        if node not in self._parked:
            self._enqueue(self._enter(node, self._retention.now))
        self._aside.pop(node, None)
        self._move_first(node)

    def discard(self, node: Node) -> None:
        del self._order[node]
        del (self._aside if node in self._aside else self._recent)[node]
        if node in self._parked:
            del self._parked[node]

    def discard_all(self, nodes: Iterable[Node]) -> None:
        parked = self._parked
        for node in nodes:
            self.discard(node)
            if node.parent in parked:
                self._unpark(node.parent)

    def victims(self) -> Iterator[Node]:
        self._grow_older()
        if self._version != self._retention.version:
            self._sort()
        if self.cautious or not self._retention.is_trained:
            return self._least_recent_first()
        return self._least_first()

    def __contains__(self, node: object) -> bool:
        return node in self._order

    def _least_recent_first(self) -> Iterator[Node]:
        """The order of an LRU, except that nodes which a client expects to use again come last.
        When the caller stops reading, the expected nodes that were passed over are set
        aside, so that the next caller does not pass over them again."""
        self._take_back()
        now = self._retention.now
        expected: list[Node] = []
        try:
            for node in self._recent:
                if node.expected_until_s > now:
                    expected.append(node)
                else:
                    yield node
            yield from chain(self._aside, expected)
        finally:
            for node in expected:
                if node in self._recent:  # it was not evicted
                    self._set_aside(node)

    def _set_aside(self, node: Node) -> None:
        del self._recent[node]
        self._aside[node] = None
        heappush(self._ends, (node.expected_until_s, next(self._numbers), node))
        if len(self._ends) > 2 * len(self._aside) + _MIN_SWEEP:
            self._ends = [(n.expected_until_s, next(self._numbers), n) for n in self._aside]
            heapify(self._ends)

    def _take_back(self) -> None:
        """Move nodes that are not expected any more back to the front."""
        now, ends = self._retention.now, self._ends
        ended: list[Node] = []
        while ends and ends[0][0] <= now:
            node = ends[0][2]
            if (
                node in self._aside and node.expected_until_s > now
            ):  # it is expected for longer now
                heapreplace(ends, (node.expected_until_s, next(self._numbers), node))
                continue
            heappop(ends)
            if node in self._aside:
                del self._aside[node]
                ended.append(node)
        for node in reversed(ended):  # children are before their parents again
            self._move_first(node)

    def _move_first(self, node: Node) -> None:
        self._recent[node] = None
        self._recent.move_to_end(node, last=False)

    def _least_first(self) -> Iterator[Node]:
        """Yield nodes in order. Their entries leave the queues meanwhile and return when the
        reader has finished."""
        offered: list[_Entry] = []
        try:
            while (entry := self._pop_least()) is not None:
                offered.append(entry)
                node = entry.node
                yield node
                if node.parent in self._parked:
                    self._unpark(node.parent)
            yield from list(self._parked)
        finally:
            on_device = self._on_device
            for entry in reversed(offered):
                node = entry.node
                # Evicted nodes are discarded soon, so their entries do not return.
                if len(node.device if on_device else node.host):
                    self._enqueue(entry, first=True)

    def _pop_least(self) -> _Entry | None:
        """Remove and return the oldest entry of the least dense queue. Nodes with children are
        parked."""
        heap, queues, order = self._heap, self._queues, self._order
        while heap:
            place = heap[0][1]
            queue = queues[place]
            if not queue:
                heappop(heap)
                continue
            entry = queue.popleft()
            node = entry.node
            if order.get(node) is not entry or entry.place != place:
                continue
            if not (self._on_device and node.device_children):
                return entry
            self._park(node)
        return None

    def _require_new(self, node: Node) -> None:
        if node in self._order:
            raise InvariantError("a node entered the eviction order twice")

    def _park(self, node: Node) -> None:
        self._order[node] = None
        self._parked[node] = None

    def _unpark(self, node: Node) -> None:
        """Put a node into its queue when it has no more children on the device."""
        if not node.device_children:
            del self._parked[node]
            self._enqueue(self._enter(node, self._retention.now))

    def _enter(self, node: Node, now: float) -> _Entry:
        """Give a node an entry in the bin of its age."""
        order = self._order
        mark = node.mark
        if mark is None:
            mark = node.mark = RetentionMark(now, self._retention.unknown)
        used_s, run_class, _ = mark
        if node.wanted_s > used_s and now - node.wanted_s < EDGES[_WANTED_BINS]:
            used_s, run_class = node.wanted_s, self._retention.wanted
        age_bin = 0 if used_s >= now else min(bisect_right(EDGES, now - used_s) - 1, NUM_BINS)
        entry = order[node] = _Entry(node, used_s, run_class * ROW + age_bin)
        self._timers[age_bin].append(entry)
        self._entered += 1
        return entry

    def _enqueue(self, entry: _Entry, *, first: bool = False) -> None:
        place = entry.place
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = deque()
        if not queue:
            heappush(self._heap, (self._retention.hazards.densities.item(place), place))
        if first:
            queue.appendleft(entry)
        else:
            queue.append(entry)

    def _grow_older(self) -> None:
        """Move every node that is older than its bin to the next queue of its class."""
        now, order = self._retention.now, self._order
        if now == self._aged_s:
            return
        self._aged_s = now
        moved, queues = 0, self._queues
        not_wanted = self._retention.wanted * ROW + _WANTED_BINS
        for age_bin, (timers, next_timers) in enumerate(pairwise(self._timers)):
            until = now - EDGES[age_bin + 1]
            while timers and timers[0].used_s <= until:
                entry = timers.popleft()
                node = entry.node
                # A stale entry: the node was used again or has left the order; it has another
                # entry or none.
                if order.get(node) is not entry:
                    continue
                entry.place += 1
                if entry.place == not_wanted:
                    self._enqueue(self._enter(node, now))
                    continue
                next_timers.append(entry)
                moved += 1
                queue = queues.get(entry.place)
                if queue:
                    queue.append(entry)
                else:
                    self._enqueue(entry)
        self._entered += moved

    def _max_entered(self) -> int:
        """Entries until the next sweep. The first sweep comes early, because the guard needs
        the size."""
        least = _MIN_SWEEP if not self.resident_blocks else 4 * _MIN_SWEEP
        return least + 4 * len(self._order)

    def _sweep(self) -> None:
        """Remove stale entries and empty queues, and measure how many blocks there are."""
        order, queues = self._order, {}
        for place, queue in self._queues.items():
            current = deque(
                entry
                for entry in queue
                if entry.place == place and order.get(entry.node) is entry
            )
            if current:
                queues[place] = current
        self._queues = queues
        self._entered = 0
        self.resident_blocks = sum(node.num_blocks for node in order)
        self._sort()

    def _sort(self) -> None:
        """Sort the queues by their current densities."""
        densities = self._retention.hazards.densities
        self._heap = [(densities.item(place), place) for place, q in self._queues.items() if q]
        heapify(self._heap)
        self._version = self._retention.version
