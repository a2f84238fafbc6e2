"""Publishing: the one place where computed blocks become findable."""

import numpy as np

from headwater.cache.keys import TokenPath
from headwater.cache.kv_event_log import KVEventLog
from headwater.cache.matcher import Ghosts
from headwater.cache.node import Node
from headwater.cache.pins import Pins
from headwater.cache.plan import Lease
from headwater.cache.pool import SlotPool, SlotState
from headwater.cache.tree import PrefixTree
from headwater.cache.write_queue import WriteQueue
from headwater.types import EMPTY, Slots, Tier

_SHORT_RUN = 64
"""A node of up to this many blocks is always extended in place."""

_DEVICE = Tier.DEVICE
_HELD, _CACHED = SlotState.HELD, SlotState.CACHED


class Publisher:
    """Finds or creates nodes. If two sequences computed the same block, the first one published
    stays."""

    def __init__(
        self,
        tree: PrefixTree,
        pool: SlotPool,
        pins: Pins,
        ghosts: Ghosts,
        writes: WriteQueue,
        events: KVEventLog | None = None,
    ) -> None:
        self._tree = tree
        self._pool = pool
        self._pins = pins
        self._ghosts = ghosts
        self._writes = writes
        self._events = events

    def publish(self, lease: Lease, path: TokenPath, slots: Slots, now: float) -> Slots:
        """Find or create a node for each block; return the slots of blocks that were published
        already."""
        pool = self._pool
        pool.move(slots, _HELD, _CACHED)
        node, at, surplus = lease.node, 0, []
        count = len(slots)
        if _can_extend(node, count):  # no node is after a leaf: nothing to find
            self._extend(node, path, slots)
            return EMPTY
        while at < count:
            block = lease.num_blocks + at
            first = self._tree.first(path, block)
            child = node.children.get(first)
            if child is None:
                node = self._append(node, first, path, slots[at:] if at else slots)
                break
            node, known, common = self._join(child, path, block, slots[at:], now)
            surplus.append(slots[at : at + known])
            at += common
        lease.node = node
        if not surplus:
            return EMPTY
        rest = np.concatenate(surplus)
        pool.move(rest, _CACHED, _HELD)
        return rest

    def learn_stored(self, path: TokenPath, count: int, now: float) -> None:
        """Storage has the first `count` blocks of `path`: find or create their nodes."""
        if self._is_stored(path, count):
            return
        node, block = self._tree.root(path.namespace), 0
        self._pins.pin(node)
        while block < count:
            first = self._tree.first(path, block)
            child = node.children.get(first)
            if child is None:
                child = self._make_child(node, first, path, count - block)
                self._tree.stored_only[child] = None
            common = self._tree.common(child, path, block, count)
            if common < child.num_blocks:
                child = self._pins.split(child, common, now)
            known, child.num_stored = child.num_stored, common
            if self._events is not None:
                self._events.stored(child, Tier.STORAGE, known, common)
            self._pins.extend(child)
            node, block = child, block + common
        self._tree.version += 1
        self._pins.release(node, now=now)

    def _is_stored(self, path: TokenPath, count: int) -> bool:
        """Whether the tree knows already that storage has the first `count` blocks of `path`."""
        nodes, found = self._tree.walk(path, count)
        if found < count:
            return False
        return all(
            node.num_stored >= min(node.num_blocks, count - node.start) for node in nodes
        )

    def _make_child(self, parent: Node, first: bytes, path: TokenPath, count: int) -> Node:
        """Create a node after `parent` that has no blocks in any tier yet."""
        ghost = self._ghosts.revive(parent, parent.start + parent.num_blocks, first)
        if ghost is None:
            return self._tree.add_child(parent, first, path, count)
        _, uid, num_uses = ghost
        node = self._tree.add_child(parent, first, path, count, uid)
        node.num_earlier_uses = num_uses
        return node

    def _append(self, parent: Node, first: bytes, path: TokenPath, slots: Slots) -> Node:
        """Add blocks, which are not in the tree yet, after `parent`, which this lease pins."""
        count = len(slots)
        if _can_extend(parent, count):
            self._extend(parent, path, slots)
            return parent
        node = self._make_child(parent, first, path, count)
        node.device = slots
        node.pins = 1
        parent.device_children += 1
        self._report(node, 0, count)
        return node

    def _extend(self, node: Node, path: TokenPath, slots: Slots) -> None:
        """Append the next blocks of `path` to `node`."""
        start = node.num_blocks
        self._tree.extend(node, path, len(slots))
        node.device = self._pool.joined([node.device, slots])
        self._report(node, start, node.num_blocks)

    def _report(self, node: Node, start: int, end: int) -> None:
        """Publish events for blocks [start, end) of `node`, which are on the device now, and
        queue them for writing if the policy says so."""
        if self._events is not None:
            self._events.stored(node, _DEVICE, start, end)
        if self._writes.through:
            self._writes.add_committed(node)

    def _join(
        self, child: Node, path: TokenPath, block: int, slots: Slots, now: float
    ) -> tuple[Node, int, int]:
        """Extend a lease to `child`, which is in the tree already.

        Returns the new last node of the lease, how many of its blocks were on the device (those
        slots are surplus; the node takes the others), and how many blocks are common.
        """
        common = self._tree.common(child, path, block, block + len(slots))
        if common < child.num_blocks:
            child = self._pins.split(child, common, now)
        known = len(child.device)
        self._pins.extend(child)
        if known < common:
            both = child.num_both
            child.device = self._pool.joined([child.device, slots[known:common]])
            self._tree.num_both += child.num_both - both
            self._tree.version += 1
            if not known:
                child.parent.device_children += 1  # type: ignore[union-attr]  # not a root
                self._tree.stored_only.pop(child, None)
            self._report(child, known, common)
        return child, known, common


def _can_extend(node: Node, count: int) -> bool:
    """Whether to append to `node` instead of creating a node after it.

    Only a leaf that one lease pins may change its last block, because other leases and jobs
    refer to a node as the end of a path. Appending copies the tokens of the node; a long node
    is therefore extended only by at least an eighth of its length, which keeps the total cost
    linear.
    """
    return (
        node.pins == 1
        and not node.children
        and not node.jobs
        and node.parent is not None
        and (node.num_blocks <= _SHORT_RUN or count * 8 >= node.num_blocks)
    )
