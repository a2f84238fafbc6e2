"""Pins prevent eviction from the device. A pin on a node is a pin on its whole path.

So nothing below an unpinned node is pinned, and every device block of an unpinned node can be
evicted. Therefore the count of evictable blocks is exact, and taking slots is all or nothing.
"""

from collections.abc import Sequence

import numpy as np

from headwater.cache.node import Node
from headwater.cache.plan import Match
from headwater.cache.policy import MarkedRun
from headwater.cache.pool import SlotState, TierPool
from headwater.cache.tree import PrefixTree
from headwater.cache.write_queue import WriteQueue
from headwater.types import EMPTY, Slots, Tier


class Pins:
    """Keeps the eviction orders correct when nodes are pinned, split or reset."""

    def __init__(
        self, tree: PrefixTree, device: TierPool, host: TierPool, writes: WriteQueue
    ) -> None:
        self._tree = tree
        self._writes = writes
        self._window = writes.window
        self._device = device
        self._host = host
        self._has_host = host.pool.num_slots > 0
        self.tick = 0
        """How many paths were released so far; `used` of a node is one of these values."""
        self.retired: set[Node] = set()
        """Nodes removed by a reset that are still pinned and own their slots."""

    def pin(self, node: Node) -> None:
        """Pin `node` and all its ancestors."""
        device = self._device
        at: Node | None = node
        while at is not None:
            if not at.pins:
                count = len(at.device)
                if count:
                    device.order.discard(at)
                    device.evictable -= count
                    if len(at.host) and self._window.is_enabled:
                        self._host.mark_duplicate(at)
            at.pins += 1
            at = at.parent

    def extend(self, child: Node) -> None:
        """Let a lease that pins the parent of `child` pin `child` too."""
        if not child.pins and len(child.device):
            self._device.discard(child)
        child.pins += 1

    def release(self, node: Node, *, now: float) -> None:
        """Unpin a path that was used: it becomes the most recently used in every tier.

        The deepest node is added first, so that a node precedes its parent in the order.
        """
        self.tick += 1
        tick = self.tick
        if node.gone:
            self._free_slots(self._decrement(node))
            return
        device, host = self._device, self._host
        soon = not self._window.is_enabled or self._window.has_everything
        at: Node | None = node
        while at is not None:
            at.pins -= 1
            at.used = tick
            if not at.pins:
                count = len(at.device)
                if count:
                    device.order.add(at, now)
                    device.evictable += count
            if self._has_host and len(at.host) and not at.jobs:
                host.order.discard(at)
                host.order.add(at, now)
                host.duplicates.pop(at, None)
                if at.pins or not soon:
                    host.mark_duplicate(at)
            at = at.parent

    def matched_nodes(self, match: Match, now: float) -> list[Node]:
        """The nodes of `match`, of which only the blocks that match are used.

        The last node is split where the match ends. Otherwise the rest of that node would count
        as used too, and a full tier would keep it instead of other blocks.
        """
        nodes = list(match.nodes)
        if nodes and match.num_blocks < nodes[-1].end and match.num_blocks > nodes[-1].start:
            at = match.num_blocks - nodes[-1].start
            nodes[-1] = self.split(nodes[-1], at, now)
        return nodes

    def want(self, match: Match, *, now: float) -> Node:
        """Make the path of `match`, which a waiting request will use, the most recently used of
        the device. Returns its last node."""
        order = self._device.order
        nodes = self.matched_nodes(match, now)
        for node in reversed(nodes):
            node.wanted_s = now
            if not node.pins and len(node.device):
                order.discard(node)
                order.add(node, now)
        return nodes[-1]

    def unpin(self, node: Node, *, now: float, cold: bool = False) -> None:
        """Unpin a path that a job kept but no request used.

        With `cold`, the next nodes to be evicted are `node` and the nodes of its path that were
        not used later than `node`.
        """
        unpinned = self._decrement(node)
        if not unpinned:
            return
        device = self._device
        gone: list[Node] = []
        unused: list[Node] = []
        for at in unpinned:
            count = len(at.device)
            if at.gone:  # storage lost the end of the path meanwhile, or a reset removed all
                gone.append(at)
            elif count:
                device.evictable += count
                if cold and at.used <= node.used:
                    unused.append(at)
                else:
                    device.order.add(at, now)
        for at in reversed(unused):
            device.order.add_cold(at, now)
        if gone:
            self._free_slots(gone)

    def mark(self, node: Node, runs: Sequence[MarkedRun], *, now: float) -> None:
        """Give each node of the path that ends with `node` the mark of the run that contains
        its middle block.

        If the last run is `separate` and begins inside a node, that node is split there.
        """
        at, last = node, len(runs) - 1
        if runs[last].separate and last and runs[last - 1].end > at.start:
            at.mark = runs[last].mark
            at = self.split(at, runs[last - 1].end - at.start, now)
        while at.parent is not None:
            middle = (at.start + at.end) // 2
            while last and runs[last - 1].end > middle:
                last -= 1
            at.mark = runs[last].mark
            at = at.parent

    def expect(self, node: Node, until_s: float) -> None:
        """Record that the client expects to use the path that ends with `node` again before
        `until_s`."""
        at = node
        while at.parent is not None:
            at.expected_until_s = max(at.expected_until_s, until_s)
            at = at.parent

    def close(self, node: Node, num_shared: int) -> None:
        """The client says that this path is not needed any more.

        Its blocks from `num_shared` on that no other path continues become the first to be
        evicted, deepest first.
        """
        own: list[Node] = []
        at = node
        while at.parent is not None and at.start >= num_shared:
            if len(at.children) > bool(own):
                break
            own.append(at)
            at = at.parent
        for closed in reversed(own):
            closed.suspended_at = closed.used  # writing the blocks is not worth it either
            closed.expected_until_s = -1.0
            if len(closed.device) and not closed.pins:
                self._device.order.close(closed)
            if len(closed.host) and not closed.jobs:
                self._host.order.close(closed)

    def withheld_by(self, node: Node) -> int:
        """Device blocks that would stop being evictable if `node` were pinned."""
        blocks = 0
        at: Node | None = node
        while at is not None and not at.pins:
            blocks += len(at.device)
            at = at.parent
        return blocks

    def split(self, node: Node, at: int, now: float) -> Node:
        """Split `node` and put the head next to it in the orders; return the head."""
        on_device = len(node.device) if not node.pins else 0
        on_host = len(node.host) if not node.jobs else 0
        head = self._tree.split(node, at)
        if not node.pins:
            _place(self._device, head, node, on_device, now)
        if self._has_host:
            _place(self._host, head, node, on_host, now)
            self._writes.divide(head, node)
        return head

    def retire_all(self) -> None:
        """Empty the tree. Slots of unpinned nodes become free; pinned nodes keep theirs until
        their pins are released."""
        idle: list[Node] = []
        for node in self._tree.nodes():
            if not node.pins and len(node.device):
                self._device.discard(node)
            if not node.jobs and len(node.host):
                self._host.discard(node)
            if node.pins:
                self.retired.add(node)
            else:
                idle.append(node)
        self._tree.clear()
        self._free_slots(idle)

    def _decrement(self, node: Node) -> list[Node]:
        """Remove one pin from the path; return the nodes that have none left, deepest first."""
        unpinned = []
        at: Node | None = node
        while at is not None:
            at.pins -= 1
            if not at.pins:
                unpinned.append(at)
            at = at.parent
        return unpinned

    def _free_slots(self, nodes: list[Node]) -> None:
        """Free the slots of nodes that have left the tree, in one batch per tier."""
        device: list[Slots] = [EMPTY]
        host: list[Slots] = [EMPTY]
        for node in nodes:
            device.append(node.device)
            host.append(node.host)
            self._tree.num_both -= node.num_both
            node.device = node.host = EMPTY
            self.retired.discard(node)
        self._device.pool.free(np.concatenate(device), SlotState.CACHED)
        self._host.pool.free(np.concatenate(host), SlotState.CACHED)


def _place(tier_pool: TierPool, head: Node, tail: Node, was_evictable: int, now: float) -> None:
    """Correct the order after a split; before it, the whole node had `was_evictable` blocks in
    the order.

    A job may belong to one half only, so a half can become evictable by the split.
    """
    # The tail keeps its position. The position of the head does not matter, because the caller
    # pins or uses it next.
    evictable = 0 if _is_kept(tier_pool, tail) else tier_pool.blocks(tail)
    if was_evictable and not evictable:
        tier_pool.order.discard(tail)
        tier_pool.duplicates.pop(tail, None)
    elif evictable and not was_evictable:
        tier_pool.order.add_cold(tail, now)
    tier_pool.evictable += evictable - was_evictable
    if tier_pool.blocks(head) and not _is_kept(tier_pool, head):
        tier_pool.add(head, now, cold=True)


def _is_kept(tier_pool: TierPool, node: Node) -> bool:
    """Whether `node` must not be evicted from this tier, however old it is."""
    return node.pins > 0 if tier_pool.tier is Tier.DEVICE else bool(node.jobs)
