"""Eviction: removes the ends of leaves from the tree, exactly as many blocks as asked.

The cost is proportional to the evicted blocks, however many leaves are cached. Slots are *moved
out* of their node before they go to the pool, so that no second path can free them again.
"""

from collections.abc import Container, Iterable, Iterator

from headwater.cache.kv_event_log import KVEventLog
from headwater.cache.matcher import Ghosts
from headwater.cache.node import Node
from headwater.cache.plan import MissReason
from headwater.cache.pool import SlotState, TierPool
from headwater.cache.tree import PrefixTree, subtree
from headwater.cache.write_queue import WriteQueue
from headwater.errors import InvariantError
from headwater.types import EMPTY, Slots, Tier

_DEVICE, _HOST = Tier.DEVICE, Tier.HOST
_CACHED = SlotState.CACHED


class Evictor:
    """Makes room in the device and host tiers and keeps the tree consistent with them."""

    def __init__(
        self,
        tree: PrefixTree,
        device: TierPool,
        host: TierPool,
        ghosts: Ghosts,
        writes: WriteQueue,
        max_stored: int,
        events: KVEventLog | None = None,
    ) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self._ghosts = ghosts
        self._writes = writes
        self._max_stored = max_stored
        self._events = events
        self._stored_only = tree.stored_only
        self.lost = 0
        """Blocks that left their last tier since the start."""
        self.forgotten = 0
        """Blocks of `lost` whose last tier was storage, or that were damaged there."""

    def take_device(self, count: int, state: SlotState) -> Slots | None:
        """Take `count` device slots, evicting exactly as many blocks as are missing. If that is
        not possible, change nothing and return None."""
        device = self._device
        pool = device.pool
        missing = count - pool.num_free
        if missing <= 0:
            return pool.take(count, state)
        if missing > device.evictable:
            return None
        evicted = self._evict_one() if missing == 1 else None
        return pool.reuse(evicted or self._evict_device(missing), _CACHED, state)

    def trim_device(self, count: int) -> int:
        """Evict up to `count` device blocks and free their slots; return how many."""
        count = min(count, self._device.evictable)
        if count <= 0:
            return 0
        pool = self._device.pool
        pool.free(pool.joined(self._evict_device(count)), _CACHED)
        return count

    def evict_host(self, count: int, kept: Container[Node] = ()) -> int:
        """Evict up to `count` host blocks, but none of `kept`; return how many. The result is
        smaller when the other blocks are in use."""
        host = self._host
        moved: list[Slots] = []
        # Duplicates above other host blocks go last: if the device lost one of them before it
        # is written again, the host blocks below it could not be found any more.
        duplicates = sorted(host.duplicates, key=_has_host_children)
        need = self._host_pass(duplicates, count, moved, kept)
        while need:
            before = need
            need = self._host_pass(host.order.victims(), need, moved, kept)
            if need == before:
                break
        evicted = count - need
        host.evictable -= evicted
        host.evicted += evicted
        host.pool.free(host.pool.joined(moved), _CACHED)
        self.bound_stored()
        return evicted

    def forget_stored(self, node: Node, count: int, reason: MissReason) -> None:
        """Record that storage has only the first `count` blocks of `node`."""
        known, node.num_stored = node.num_stored, min(node.num_stored, count)
        self._tree.version += 1
        if self._events is not None:
            self._events.removed(node, Tier.STORAGE, node.num_stored, known)
        lost = self.lost
        self._shrink(node, reason)
        self.forgotten += self.lost - lost

    def bound_stored(self) -> None:
        """Forget the oldest nodes that only storage has, until the limit is kept.

        Each call removes about as many nodes as were added since the last call. A node with a
        job is being read: it is not removed but becomes the newest, and each node is tried
        once.
        """
        stored_only = self._stored_only
        attempts = len(stored_only)
        if attempts <= self._max_stored:
            return
        while attempts > 0 and len(stored_only) > self._max_stored:
            attempts -= 1
            node = next(iter(stored_only))
            if node.jobs or node.pins:
                stored_only.move_to_end(node)
            else:
                self.forget_stored(node, 0, MissReason.EVICTED_STORAGE)

    def _evict_device(self, count: int) -> list[Slots]:
        """Move the slots of `count` evictable blocks out of their nodes."""
        device = self._device
        moved: list[Slots] = []
        need = count
        if self._writes.window.is_enabled:
            # Blocks with a host copy are found again, so they go first: a large admission may
            # evict more than was written ahead.
            need = self._device_pass(self._written_victims(), need, moved)
            if need:
                need = self._device_pass(self._childless_victims(), need, moved)
        while need:  # The policy may offer parents before their children.
            before = need
            need = self._device_pass(self._device.order.victims(), need, moved)
            if need == before:
                raise InvariantError("blocks counted as evictable cannot be evicted")
        device.evictable -= count
        device.evicted += count
        if len(self._stored_only) > self._max_stored:
            self.bound_stored()
        return moved

    def _evict_one(self) -> list[Slots] | None:
        """Move the last slot of the first victim out of its node and return it; None if that
        needs a search or empties the node. A running sequence uses this for its next block."""
        device = self._device
        node = next(iter(device.order.victims()))
        slots = node.device
        left, on_host = len(slots) - 1, len(node.host)
        if not left or node.device_children:
            return None
        if on_host <= left:
            if self._writes.window.is_enabled:
                return None
        else:
            self._host.duplicates.pop(node, None)
            self._tree.num_both -= 1
        if self._events is not None:
            self._events.removed(node, _DEVICE, left, left + 1)
        node.device = slots[:left]
        self._tree.version += 1
        device.evictable -= 1
        device.evicted += 1
        if on_host < node.num_blocks:
            self._shrink(node, MissReason.EVICTED_DEVICE)
        return [slots[left:]]

    def _written_victims(self) -> Iterator[Node]:
        """Nodes of the device order that are also on the host. The search ends when it has
        skipped more blocks than the eviction window has."""
        patience = self._writes.window.num_blocks
        for node in self._device.order.victims():
            if len(node.host) >= len(node.device):
                yield node
            elif not node.device_children:
                patience -= len(node.device)
                if patience < 0:
                    return

    def _childless_victims(self) -> Iterator[Node]:
        """Nodes of the device order that no host block depends on. The search ends when it has
        skipped more blocks than the eviction window has."""
        patience = self._writes.window.num_blocks
        for node in self._device.order.victims():
            if len(node.host) >= len(node.device) or not node.host_children:
                yield node
            elif not node.device_children:
                patience -= len(node.device)
                if patience < 0:
                    return

    def _device_pass(self, victims: Iterable[Node], need: int, moved: list[Slots]) -> int:
        """Evict up to `need` blocks of `victims`; return how many are missing.

        This is the hot loop of a full cache. It does what one leaf needs; everything that can
        be done for all leaves together follows after the loop.
        """
        evicted: list[Node] = []
        leaves: list[Node] = []
        duplicates, events = self._host.duplicates, self._events
        for node in victims:
            if node.device_children:
                continue
            slots = node.device
            count, on_host = len(slots), len(node.host)
            left = count - need if count > need else 0
            if on_host:
                duplicates.pop(node, None)
                self._tree.num_both -= max(min(count, on_host) - left, 0)
            if events is not None:
                events.removed(node, _DEVICE, left, count)
            if left:
                moved.append(slots[left:])
                node.device = slots[:left]
                need = 0
                if on_host < node.num_blocks:
                    self._shrink(node, MissReason.EVICTED_DEVICE)
                break
            moved.append(slots)
            node.device = EMPTY
            evicted.append(node)
            # The child leaves first; only then can its parent be a leaf.
            parent: Node = node.parent  # type: ignore[assignment]  # a root has no slots
            parent.device_children -= 1
            if on_host or node.num_stored or node.children:
                if on_host < node.num_blocks:
                    self._shrink(node, MissReason.EVICTED_DEVICE)
            else:
                self._cut(node, parent)
                leaves.append(node)
            need -= count
            if not need:
                break
        # A match made before this pass may count evicted blocks: it is not current any more.
        self._tree.version += 1
        if evicted:
            self._finish_device_pass(evicted, leaves)
        return need

    def _finish_device_pass(self, evicted: list[Node], leaves: list[Node]) -> None:
        """Update order, write queue and ghosts: `evicted` nodes have left the device; `leaves`
        are those of them that are in no tier now."""
        self._device.order.discard_all(evicted)
        self._writes.discard(evicted, Tier.DEVICE)
        self._bury(leaves, MissReason.EVICTED_DEVICE)

    def _host_pass(
        self, victims: Iterable[Node], need: int, moved: list[Slots], kept: Container[Node]
    ) -> int:
        """Evict up to `need` blocks of `victims` from the host; return how many are missing."""
        evicted: list[Node] = []
        leaves: list[Node] = []
        host, events = self._host, self._events
        duplicates, pool = host.duplicates, host.pool
        for node in victims:
            if not need:
                break
            slots, on_device = node.host, len(node.device)
            # A node that is also on the device can leave the host. Otherwise it must stay
            # while a child on the host needs it, or a load to the device goes through it.
            if on_device < node.num_blocks and (node.host_children or node.pins):
                continue
            # Evicting blocks that a lost write may still read would free no slot.
            if node in kept or pool.has_lost_read(slots):
                continue
            if node in duplicates:
                node.suspended_at = -1  # the device must write the blocks again
            count = len(slots)
            keep = count - need if count > need else 0
            if events is not None:
                events.removed(node, _HOST, keep, count)
            if on_device > keep:
                self._tree.num_both -= min(on_device, count) - keep
            need -= count - keep
            if keep:
                moved.append(slots[keep:])
                node.host = slots[:keep]
                self._shrink(node, MissReason.EVICTED_HOST)
                break
            moved.append(slots)
            node.host = EMPTY
            evicted.append(node)
            parent: Node = node.parent  # type: ignore[assignment]  # a root has no slots
            parent.host_children -= 1
            if on_device or node.num_stored or node.children:
                if on_device < node.num_blocks:
                    self._shrink(node, MissReason.EVICTED_HOST)
            else:
                self._cut(node, parent)
                leaves.append(node)
        self._tree.version += 1
        self._finish_host_pass(evicted, leaves)
        return need

    def _finish_host_pass(self, evicted: list[Node], leaves: list[Node]) -> None:
        """Update order, write queue and ghosts: `evicted` nodes have left the host; `leaves`
        are those of them that are in no tier now."""
        duplicates = self._host.duplicates
        if duplicates:
            for node in evicted:
                duplicates.pop(node, None)
        self._host.order.discard_all(evicted)
        self._writes.discard(evicted, Tier.HOST)
        self._bury(leaves, MissReason.EVICTED_HOST)

    def _cut(self, node: Node, parent: Node) -> None:
        """Take a leaf that is in no tier any more out of the tree; `_bury` does the rest."""
        if parent.children.pop(node.first, None) is not node:
            raise InvariantError("a node in the eviction order is not in the tree")
        node.gone = True

    def _bury(self, leaves: list[Node], reason: MissReason) -> None:
        """Remember why `leaves`, which were taken out of the tree, are not cached any more."""
        if leaves:
            self.lost += self._ghosts.add(leaves, reason)
            self._tree.forget(leaves)

    def _shrink(self, node: Node, reason: MissReason) -> None:
        """Make `node` end with its last block that is in any tier; remove it if there is
        none."""
        left = len(node.device)
        if node.num_stored or node.children or len(node.host):
            local, left = max(left, len(node.host)), node.covered()
            if node.host_children and local < node.num_blocks:
                self._strip_host_below(node)
            if left and not local:
                self._stored_only[node] = None
            if left == node.num_blocks:
                return
            self._drop_children(node)
        if left:
            self.lost += node.num_blocks - left
            self._tree.shorten(node, left, reason)
        else:
            self.lost += self._ghosts.add([node], reason)
            self._tree.remove(node)

    def _strip_host_below(self, node: Node) -> None:
        """Remove everything below `node` from the host, because `node` is not there any more.

        Nothing below is pinned, because such a pin would be on `node` too. A node that is being
        written to storage is not in the host order, and the pool quarantines the slots of the
        write.
        """
        moved: list[Slots] = []
        for below in reversed(list(subtree(node))[1:]):
            if len(below.host):
                if self._events is not None:
                    self._events.removed(below, Tier.HOST, 0, len(below.host))
                self._tree.num_both -= below.num_both
                moved.append(below.host)
                if not below.jobs:
                    self._host.discard(below)
                self._writes.discard((below,), Tier.HOST)
                below.host = EMPTY
                below.parent.host_children -= 1  # type: ignore[union-attr]  # not a root
                self._shrink(below, MissReason.EVICTED_HOST)
        pool = self._host.pool
        pool.free(pool.joined(moved), _CACHED)

    def _drop_children(self, node: Node) -> None:
        """Forget what storage has below `node`: without their parent the blocks cannot be
        found. Children are removed first, so that each node still has its parent when it is
        removed."""
        for below in reversed(list(subtree(node))[1:]):
            if self._events is not None:
                self._events.removed(below, Tier.STORAGE, 0, below.num_stored)
            self._tree.remove(below)
            self.lost += below.num_blocks


def _has_host_children(node: Node) -> bool:
    return node.host_children > 0
