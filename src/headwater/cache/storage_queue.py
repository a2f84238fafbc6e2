"""The queue of writes to storage: which host blocks are written first.

Storage often accepts less than is computed. Then most queued blocks leave the host before their
turn, and the order decides what storage can find later. First are, in this order:

1. paths of sessions whose client said that they return,
2. prefixes that several paths share,
3. all others,
4. sessions that are over, as their client said;

within each, blocks that were used most often, then those that were queued first. Uses before an
eviction count too: ghosts remember them. A block in storage is found only if all blocks before it
are there too. So a node waits until its parent is stored, and lends the parent its rank.

Bounds: a queued node is in the tree and has host blocks. There are at most `max_nodes`; above
that the lower half by rank is dropped. The heap has at most twice as many entries, plus a
constant.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

from headwater.cache.node import Node


class WriteLevel(IntEnum):
    """Levels of the order, first to last."""

    EXPECTED = 0
    SHARED = 1
    OTHER = 2
    OVER = 3


WriteRank: TypeAlias = tuple[int, int, int]
"""Sort key, smallest first: level, negative number of uses, serial number."""

_Entry: TypeAlias = tuple[WriteRank, int, Node]
"""The serial number in the middle is unique, so nodes are never compared. It is negative if the
entry is not in the heap: it was examined, and waits for its parent or a job."""

_MAX_NODES = 16_384
_SPARE_ENTRIES = 1_024
MANY_USES = 6
"""Uses above this number do not make another use more likely."""


class StorageQueue:
    """Nodes with host blocks that storage does not have. Decides only the order."""

    def __init__(
        self,
        write_to_host: Callable[[Node], None],
        *,
        by_reuse: bool = True,
        max_nodes: int = _MAX_NODES,
    ) -> None:
        """`write_to_host` queues a node that only the device has. Without `by_reuse` the order is
        first come, first served."""
        self._write_to_host = write_to_host
        self._by_reuse = by_reuse
        self._max_nodes = max_nodes
        self._numbers = count()
        self._serials = count()
        self._entries: dict[Node, _Entry] = {}
        """The current entry of each queued node, also while it waits for its parent or a job."""
        self._heap: list[_Entry] = []
        """Entries to examine next. One that is not current any more is skipped."""
        self.dropped = 0
        """Blocks dropped because the queue was full."""

    @property
    def may_have_any(self) -> bool:
        """Whether `pop` may return a node. O(1)."""
        return bool(self._heap)

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def __iter__(self) -> Iterator[Node]:
        return iter(self._entries)

    def add(self, node: Node, now: float) -> bool:
        """Queue the host blocks of `node` that storage does not have, or rank the node again.
        Returns whether there are such blocks."""
        if len(node.host) <= node.num_stored or node.gone:
            return False
        before = self._entries.get(node)
        number = next(self._numbers) if before is None else before[0][2]
        self._push(node, self._rank(node, number, now))
        if len(self._entries) > self._max_nodes:
            self._drop_half()
        return True

    def pop(self) -> Node | None:
        """The node to write next. It stays queued until `resume` finds nothing left to write."""
        while self._heap:
            entry = heappop(self._heap)
            rank, serial, node = entry
            if self._entries.get(node) is not entry:
                continue
            if node.num_stored >= len(node.host):
                del self._entries[node]
                continue
            # A negative serial number: the entry is not in the heap any more.
            self._entries[node] = rank, ~serial, node
            if not node.jobs and not self._waits_for_parent(node, rank):
                return node
        return None

    def resume(self, node: Node) -> None:
        """A job of `node` ended: the node, or children that waited for it, may be written
        now."""
        entry = self._entries.get(node)
        if entry is not None:
            if node.num_stored >= len(node.host):
                del self._entries[node]
            else:
                self._push(node, entry[0])
        if node.num_stored == node.num_blocks:
            for child in node.children.values():
                waiting = self._entries.get(child)
                if waiting is not None:
                    self._push(child, waiting[0])

    def discard(self, nodes: Iterable[Node]) -> None:
        """Remove `nodes`: they have no host blocks any more, or must not be written now."""
        if self._entries:
            for node in nodes:
                self._entries.pop(node, None)

    def divide(self, head: Node, tail: Node) -> None:
        """A node was split: the head gets the rank of the tail. A half without host blocks is
        not queued."""
        entry = self._entries.get(tail)
        if entry is None:
            return
        if len(head.host):
            self._push(head, entry[0])
        if not len(tail.host):
            del self._entries[tail]

    def clear(self) -> None:
        """Empty the queue."""
        self._entries.clear()
        self._heap.clear()

    def check_bounds(self) -> bool:
        """Whether the sizes are within their bounds."""
        most = 2 * len(self._entries) + _SPARE_ENTRIES
        return len(self._entries) <= self._max_nodes and len(self._heap) <= most

    def _rank(self, node: Node, number: int, now: float) -> WriteRank:
        if not self._by_reuse:
            return 0, 0, number
        rank = _level(node, now), -min(_uses(node), MANY_USES), number
        if len(node.children) == 1:
            # An only child may wait for this node, which then gets the better rank of the two.
            # A node with several children has a high rank already, because it is shared.
            child = self._entries.get(next(iter(node.children.values())))
            if child is not None and child[0] < rank:
                return (*child[0][:2], number)
        return rank

    def _push(self, node: Node, rank: WriteRank) -> None:
        before = self._entries.get(node)
        if before is not None and before[1] >= 0 and before[0] == rank:
            return  # it is in the heap with this rank
        entry = self._entries[node] = rank, next(self._serials), node
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SPARE_ENTRIES:
            self._heap = [each for each in self._heap if self._entries.get(each[2]) is each]
            heapify(self._heap)

    def _waits_for_parent(self, node: Node, rank: WriteRank) -> bool:
        """Whether storage lacks blocks before `node`. Queued ancestors get at least its rank, and
        those that only the device has are written to the host."""
        if not self._by_reuse:
            return False
        waits = False
        at = node.parent
        while at is not None and at.parent is not None:
            if at.num_stored < at.num_blocks:
                waits = True
                above = self._entries.get(at)
                if above is not None and rank < above[0]:
                    self._push(at, (*rank[:2], above[0][2]))
                elif above is None and len(at.host) < at.num_blocks:
                    self._write_to_host(at)
            at = at.parent
        return waits

    def _drop_half(self) -> None:
        """Keep the better half by rank."""
        ranked = sorted(self._entries.values())
        for _, _, node in ranked[self._max_nodes // 2 :]:
            self.dropped += len(node.host) - node.num_stored
            del self._entries[node]


def _level(node: Node, now: float) -> WriteLevel:
    if node.expected_until_s > now:
        return WriteLevel.EXPECTED
    if len(node.children) > 1:
        return WriteLevel.SHARED
    return WriteLevel.OVER if node.expected_until_s < 0 else WriteLevel.OTHER


def _uses(node: Node) -> int:
    """How often `node` was used: the larger of the count of the eviction policy and that of the
    tree."""
    return node.num_uses if node.mark is None else max(node.mark.uses, node.num_uses)
