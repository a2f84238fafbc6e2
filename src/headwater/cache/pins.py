"""Pins: what may not be evicted. A pin on a node is a pin on its whole path.

So an unpinned node has nothing pinned below it, and every block of every unpinned node can
be evicted: the count of evictable blocks is exact, and taking slots is all or nothing.
"""

from collections.abc import Sequence

import numpy as np

from headwater.cache.node import Node
from headwater.cache.policy import MarkedRun
from headwater.cache.pool import SlotState
from headwater.cache.tier_pool import TierPool
from headwater.cache.tree import PrefixTree
from headwater.types import EMPTY, Slots, Tier


class Pins:
    """Keeps the eviction orders in step with pins, splits and resets."""

    def __init__(self, tree: PrefixTree, device: TierPool, host: TierPool) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self._has_host = host.pool.num_slots > 0
        self._tick = 0
        self.retired: set[Node] = set()
        """Nodes of an earlier generation that are pinned still, and own their slots."""

    @property
    def tick(self) -> int:
        """How many paths were released so far; `used` of a node is one of these."""
        return self._tick

    def pin(self, node: Node) -> None:
        """Keep `node` and all above it."""
        device = self._device
        at: Node | None = node
        while at is not None:
            if not at.pins:
                count = len(at.device)
                if count:
                    device.order.discard(at)
                    device.evictable -= count
            at.pins += 1
            at = at.parent

    def extend(self, child: Node) -> None:
        """A lease that pins the parent of `child` reaches into `child` now."""
        if not child.pins and len(child.device):
            self._device.discard(child)
        child.pins += 1

    def release(self, node: Node, *, now: float) -> None:
        """Let go of a path that was used: it is the most recent in every tier.

        Deepest first, so that in the order a node comes before its parent.
        """
        self._tick += 1
        tick = self._tick
        if node.gone:
            self._drain(self._unpin(node))
            return
        device = self._device
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
                self._host.discard(at)
                self._host.add(at, now)
            at = at.parent

    def let_go(self, node: Node, *, now: float, cold: bool = False) -> None:
        """Take a pin off a path that was not used meanwhile, only kept.

        With `cold`, the node and what was last used with it are the next to be evicted.
        """
        free = self._unpin(node)
        # Storage may have lost the end of the path meanwhile, a reset all of it.
        self._drain([at for at in free if at.gone])
        resident = [at for at in free if len(at.device)]
        for at in resident:
            if not (cold and at.used <= node.used):
                self._device.add(at, now)
        for at in reversed(resident):
            if cold and at.used <= node.used:
                self._device.add(at, now, cold=True)

    def mark(self, node: Node, runs: Sequence[MarkedRun], *, now: float) -> None:
        """Mark every node of the path that ends with `node` as the run of its middle block.

        A last run that is to be apart becomes a node of its own, where it is in a longer one.
        """
        at, last = node, len(runs) - 1
        if runs[last].apart and last and runs[last - 1].end > at.start:
            at.mark = runs[last].mark
            at = self.split(at, runs[last - 1].end - at.start, now)
        while at.parent is not None:
            middle = (at.start + at.end) // 2
            while last and runs[last - 1].end > middle:
                last -= 1
            at.mark = runs[last].mark
            at = at.parent

    def close(self, node: Node, num_shared: int) -> None:
        """Nobody will ask for this path again, it is said: what of it nothing else hangs on, from
        block `num_shared` on, is among the first to go, deepest first."""
        own: list[Node] = []
        at = node
        while at.gone and at.parent is not None:
            at = at.parent
        while at.parent is not None and at.start >= num_shared:
            if len(at.children) > bool(own):
                break
            own.append(at)
            at = at.parent
        for mine in reversed(own):
            mine.settled = mine.used  # not worth a write, either
            if len(mine.device) and not mine.pins:
                self._device.order.close(mine)
            if len(mine.host) and not mine.jobs:
                self._host.order.close(mine)

    def withheld_by(self, node: Node) -> int:
        """Device blocks that pinning `node` would keep from being evicted."""
        blocks = 0
        at: Node | None = node
        while at is not None and not at.pins:
            blocks += len(at.device)
            at = at.parent
        return blocks

    def split(self, node: Node, at: int, now: float) -> Node:
        """Split `node`, and put the head beside it in the orders; return the head."""
        on_device = len(node.device) if not node.pins else 0
        on_host = len(node.host) if not node.jobs else 0
        head = self._tree.split(node, at)
        if not node.pins:
            _place(self._device, head, node, on_device, now)
        if self._has_host:
            _place(self._host, head, node, on_host, now)
        return head

    def retire_all(self) -> None:
        """Empty the tree: free what nobody pins, leave the rest to those who do."""
        idle: list[Node] = []
        for root in self._tree.roots.values():
            root.gone = True
        for node in self._tree.nodes():
            node.gone = True
            if not node.pins and len(node.device):
                self._device.discard(node)
            if not node.jobs and len(node.host):
                self._host.discard(node)
            if node.pins:
                self.retired.add(node)
            else:
                idle.append(node)
        self._tree.clear()
        self._drain(idle)

    def _unpin(self, node: Node) -> list[Node]:
        """Take one pin off the path; return the nodes that have none left, deepest first."""
        free = []
        at: Node | None = node
        while at is not None:
            at.pins -= 1
            if not at.pins:
                free.append(at)
            at = at.parent
        return free

    def _drain(self, nodes: list[Node]) -> None:
        """Free the slots of nodes that are gone, in one batch for each tier."""
        device: list[Slots] = [EMPTY]
        host: list[Slots] = [EMPTY]
        for node in nodes:
            device.append(node.device)
            host.append(node.host)
            node.device = node.host = EMPTY
            self.retired.discard(node)
        self._device.pool.free(np.concatenate(device), SlotState.CACHED)
        self._host.pool.free(np.concatenate(host), SlotState.CACHED)


def _place(tier_pool: TierPool, head: Node, tail: Node, was_evictable: int, now: float) -> None:
    """Put the halves of a node that had `was_evictable` blocks in the order of `tier_pool` right.

    A job may go with one half only, so a half can become evictable by the split.
    """
    # The tail keeps its place; the head is pinned or used next, so its place does not matter.
    evictable = 0 if _kept(tier_pool, tail) else tier_pool.blocks(tail)
    if was_evictable and not evictable:
        tier_pool.order.discard(tail)
    elif evictable and not was_evictable:
        tier_pool.order.add_cold(tail, now)
    tier_pool.evictable += evictable - was_evictable
    if tier_pool.blocks(head) and not _kept(tier_pool, head):
        tier_pool.add(head, now, cold=True)


def _kept(tier_pool: TierPool, node: Node) -> bool:
    """Whether `node` may not be evicted from `tier_pool`, however old it is."""
    return node.pins > 0 if tier_pool.tier is Tier.DEVICE else bool(node.jobs)
