"""Attach blocks to a node in a tier: the one place where a node gains blocks by a transfer."""

from collections.abc import Sequence

from headwater.cache.host_log import AdoptedRun, HostBlockLog
from headwater.cache.kv_event_log import KVEventLog
from headwater.cache.node import Node
from headwater.cache.pool import TierPool
from headwater.cache.tree import PrefixTree
from headwater.types import Slots, Tier

_HOST, _STORAGE = Tier.HOST, Tier.STORAGE


class Residency:
    """Adds blocks to a node and keeps the counts of its parent and the host order correct."""

    def __init__(
        self,
        tree: PrefixTree,
        host: TierPool,
        events: KVEventLog | None = None,
        host_log: HostBlockLog | None = None,
    ) -> None:
        self._tree = tree
        self._host = host
        self._events = events
        self._host_log = host_log

    def attach(self, node: Node, tier: Tier, start: int, count: int, slots: Slots) -> bool:
        """Record that `node` has its blocks [start, start + count) in `tier`.

        Returns False and changes nothing when the blocks do not follow what the node has in
        that tier: the node left the tree, became shorter, or got the blocks another way.
        """
        if node.gone or node.parent is None or start + count > node.num_blocks:
            return False
        if tier is _STORAGE:
            if node.num_stored != start:
                return False
            node.num_stored = start + count
        else:
            both = min(len(node.device), len(node.host))
            attach = self._attach_host if tier is _HOST else self._attach_device
            if not attach(node, node.parent, start, slots):
                return False
            self._tree.num_both += min(len(node.device), len(node.host)) - both
        self._tree.version += 1
        if self._events is not None:
            self._events.stored(node, tier, start, start + count)
        return True

    def adopt(self, runs: Sequence[AdoptedRun], *, now: float) -> None:
        """Add runs that an earlier engine left in host slots. The list is in path order: each
        run comes after the run that `before` refers to."""
        nodes: list[Node] = []
        for run in runs:
            parent = self._tree.root(run.namespace) if run.before is None else nodes[run.before]
            node = self._tree.add_run(parent, run.tokens, run.keys)
            node.host = run.slots
            parent.host_children += 1
            nodes.append(node)
            if self._events is not None:
                self._events.stored(node, _HOST, 0, node.num_blocks)
        # From the end of a path to its beginning, as `touch_host` does: leaves are evicted first.
        aged = zip(nodes, runs, strict=True)
        for node, _ in sorted(aged, key=lambda pair: (pair[1].used_s, -pair[0].start)):
            self._host.add(node, now)

    def touch_host(self, node: Node | None, *, now: float) -> None:
        """Make the path that ends with `node` the most recently used of the host tier."""
        host = self._host
        order, duplicates = host.order, host.duplicates
        at = node
        while at is not None:
            count = len(at.host)
            if count and not at.jobs and not at.gone:
                if at in order:
                    order.discard(at)
                else:
                    host.evictable += count
                order.add(at, now)
                if at in duplicates:
                    del duplicates[at]
                    host.mark_duplicate(at)
            at = at.parent

    def _attach_device(self, node: Node, parent: Node, start: int, slots: Slots) -> bool:
        # The parent may have been evicted meanwhile. A device block without its parent on the
        # device could never be found, because a match walks from the root.
        if len(node.device) != start or len(parent.device) != parent.num_blocks:
            return False
        if not start:
            parent.device_children += 1
            self._tree.stored_only.pop(node, None)
        node.device = self._host.pool.joined([node.device, slots])
        return True

    def _attach_host(self, node: Node, parent: Node, start: int, slots: Slots) -> bool:
        size = parent.num_blocks
        has_parent = len(parent.device) == size or len(parent.host) == size
        if len(node.host) != start or not has_parent:
            return False
        if start:
            node.host = self._host.pool.joined([node.host, slots])
        else:
            parent.host_children += 1
            self._tree.stored_only.pop(node, None)
            node.host = slots
        if self._host_log is not None:
            self._host_log.arrived(node, start, slots)
        return True
