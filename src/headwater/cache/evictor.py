"""Eviction: takes leaf tails off the tree, exactly as many blocks as asked, in one batch.

O(evicted), however many leaves are cached. Slots are *moved out* of their node before they
go to the pool, so there is no second path by which they could be freed again.
"""

import numpy as np

from headwater.cache.ghosts import Ghosts
from headwater.cache.kv_event_log import KVEventLog
from headwater.cache.node import Node
from headwater.cache.plan import MissReason
from headwater.cache.pool import SlotState
from headwater.cache.tier_pool import TierPool
from headwater.cache.tree import PrefixTree, subtree
from headwater.errors import InvariantError
from headwater.types import EMPTY, Slots, Tier


class Evictor:
    """Makes room in the device and the host tier, and keeps the tree true meanwhile."""

    def __init__(
        self,
        tree: PrefixTree,
        device: TierPool,
        host: TierPool,
        ghosts: Ghosts,
        max_stored: int,
        events: KVEventLog | None = None,
    ) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self._ghosts = ghosts
        self._max_stored = max_stored
        self._events = events
        self.stored_only = tree.stored_only
        self.lost = 0
        """Blocks that left their last tier, ever."""

    def take_device(self, count: int, state: SlotState) -> Slots | None:
        """Take `count` device slots, evicting exactly as many blocks as are missing; or change
        nothing and return None."""
        tier_pool = self._device
        missing = count - tier_pool.pool.num_free
        if missing <= 0:
            return tier_pool.pool.take(count, state)
        if missing > tier_pool.evictable:
            return None
        return tier_pool.pool.reuse(self._evict_device(missing), SlotState.CACHED, state)

    def trim_device(self, count: int) -> int:
        """Evict up to `count` device blocks, and free their slots; return how many."""
        count = min(count, self._device.evictable)
        if count <= 0:
            return 0
        self._device.pool.free(_joined(self._evict_device(count)), SlotState.CACHED)
        return count

    def _evict_device(self, count: int) -> list[Slots]:
        """Move `count` evictable blocks' slots out of their nodes."""
        tier_pool = self._device
        moved: list[Slots] = []
        need = self._device_pass(count, moved)
        while need:  # The policy offered parents before their children.
            need = self._device_pass(need, moved)
        tier_pool.evictable -= count
        tier_pool.evicted += count
        return moved

    def evict_host(self, count: int, kept: Node | None = None) -> int:
        """Free up to `count` host slots, none of `kept`; return how many. Less, when the rest
        is in use."""
        tier_pool = self._host
        moved: list[Slots] = []
        need = count
        while need:
            before = need
            need = self._host_pass(need, moved, kept)
            if need == before:
                break
        freed = count - need
        tier_pool.evictable -= freed
        tier_pool.evicted += freed
        tier_pool.pool.free(_joined(moved), SlotState.CACHED)
        return freed

    def forget_stored(self, node: Node, count: int, reason: MissReason) -> None:
        """Storage has only the first `count` blocks of `node`."""
        known, node.num_stored = node.num_stored, min(node.num_stored, count)
        if self._events is not None:
            self._events.removed(node, Tier.STORAGE, node.num_stored, known)
        self._settle(node, reason)

    def bound_stored(self) -> None:
        """Forget the oldest nodes that only storage has, beyond the limit."""
        excess = len(self.stored_only) - self._max_stored
        if excess <= 0:
            return
        for node in [node for node in self.stored_only if not node.pins][:excess]:
            if not node.gone:
                self.forget_stored(node, 0, MissReason.EVICTED_STORAGE)

    def _device_pass(self, need: int, moved: list[Slots]) -> int:
        """Evict up to `need` blocks in one pass over the order; return what is still needed.

        The hot loop of a full cache, so what a leaf needs is done here, and only what can
        wait for the end of the pass is done there.
        """
        evicted: list[Node] = []
        leaves: list[Node] = []
        for node in self._device.order.victims():
            if node.device_children:
                continue
            slots = node.device
            count = len(slots)
            if self._events is not None:
                self._events.removed(node, Tier.DEVICE, max(count - need, 0), count)
            if count > need:
                moved.append(slots[count - need :])
                node.device = slots[: count - need]
                need = 0
                if node.num_stored or node.children or len(node.host):
                    self._settle(node, MissReason.EVICTED_DEVICE)
                else:
                    self._trim(node, len(node.device), MissReason.EVICTED_DEVICE)
                break
            moved.append(slots)
            node.device = EMPTY
            evicted.append(node)
            # The child leaves first; only then is its parent a leaf.
            parent: Node = node.parent  # type: ignore[assignment]  # a root has no slots
            parent.device_children -= 1
            if node.num_stored or node.children or len(node.host):
                self._settle(node, MissReason.EVICTED_DEVICE)
            elif parent.children.pop(node.first, None) is node:
                node.gone = True
                leaves.append(node)
            else:
                raise InvariantError("a node in the eviction order is not in the tree")
            need -= count
            if not need:
                break
        if not evicted and need:
            raise InvariantError("blocks counted as evictable cannot be evicted")
        if evicted:
            self._device.order.discard_all(evicted)
        if leaves:
            self._tree.count_cut(len(leaves))
            self.lost += self._ghosts.add(leaves, MissReason.EVICTED_DEVICE)
        return need

    def _host_pass(self, need: int, moved: list[Slots], kept: Node | None) -> int:
        evicted: list[Node] = []
        for node in self._host.order.victims():
            # What the device has too is free to go. What it has not carries the children
            # that are only on the host, and the path of a transfer.
            if len(node.device) < node.num_blocks and (node.host_children or node.pins):
                continue
            if node is kept:
                continue
            keep = max(len(node.host) - need, 0)
            if self._events is not None:
                self._events.removed(node, Tier.HOST, keep, len(node.host))
            need -= len(node.host) - keep
            moved.append(node.host[keep:])
            node.host = node.host[:keep] if keep else EMPTY
            if not keep:
                evicted.append(node)
                node.parent.host_children -= 1  # type: ignore[union-attr]  # a root has no slots
            self._settle(node, MissReason.EVICTED_HOST)
            if not need:
                break
        self._host.order.discard_all(evicted)
        return need

    def _settle(self, node: Node, reason: MissReason) -> None:
        """Make the run of `node` end where its last block in any tier is."""
        left = len(node.device)
        if node.num_stored or node.children or len(node.host):
            local, left = max(left, len(node.host)), node.covered()
            if node.host_children and local < node.num_blocks:
                self._strip_host_below(node)
            if left and not local:
                self.stored_only[node] = None
            if left == node.num_blocks:
                return
            self._drop_children(node)
        if left:
            self._trim(node, left, reason)
        else:
            self._tree.cut(node)
            self._removed([node], reason)

    def _removed(self, nodes: list[Node], reason: MissReason) -> None:
        """Count and remember nodes that were cut off: they are in no tier any more."""
        self.lost += self._ghosts.add(nodes, reason)
        if self.stored_only:
            for node in nodes:
                self.stored_only.pop(node, None)

    def _trim(self, node: Node, left: int, reason: MissReason) -> None:
        """Make the first `left` blocks of `node`, which has no children, all of its run."""
        self.lost += node.num_blocks - left
        self._tree.shorten(node, left, reason)

    def _strip_host_below(self, node: Node) -> None:
        """Take everything below `node` off the host: its parent is there no longer.

        Nothing of it is pinned, for a pin would be on `node` too; what storage has, stays.
        """
        moved: list[Slots] = []
        for below in reversed(list(subtree(node))[1:]):
            if len(below.host):
                if self._events is not None:
                    self._events.removed(below, Tier.HOST, 0, len(below.host))
                moved.append(below.host)
                self._host.discard(below)
                below.host = EMPTY
                below.parent.host_children -= 1  # type: ignore[union-attr]  # not a root
                self._settle(below, MissReason.EVICTED_HOST)
        self._host.pool.free(_joined(moved), SlotState.CACHED)

    def _drop_children(self, node: Node) -> None:
        """Forget what storage has below `node`: without its parent it is never found."""
        for child in list(node.children.values()):
            for gone in subtree(child):
                if self._events is not None:
                    self._events.removed(gone, Tier.STORAGE, 0, gone.num_stored)
                self._tree.cut(gone)
                self.stored_only.pop(gone, None)
                self.lost += gone.num_blocks


def _joined(parts: list[Slots]) -> Slots:
    """One array of all parts; the usual single part as it is."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else EMPTY
