"""The write queue: which nodes are to be copied to a lower tier, by the write policy.

Bound: a queued node is in the tree and has blocks in the tier that is read. The evictor removes
a node from the queue together with its blocks, so the queue never outgrows the tree.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from headwater.cache.config import CacheConfig
from headwater.cache.node import Node
from headwater.cache.tier_pool import TierPool
from headwater.types import Tier, WritePolicy


class WriteQueue:
    """Nodes with blocks to write, oldest first. A node leaves when nothing is left to write."""

    def __init__(self, config: CacheConfig, device: TierPool) -> None:
        self._enabled = config.host_blocks > 0
        self.through = self._enabled and config.write_policy is WritePolicy.WRITE_THROUGH
        """Whether every commit has to be queued with `add`."""
        self._write_back = self._enabled and config.write_policy is WritePolicy.WRITE_BACK
        """Whether the eviction order decides what is written."""
        self._storage = config.storage
        self._policy = config.write_policy
        self._select_hits = config.select_hits
        self._write_ahead = config.write_ahead_blocks
        self._device = device
        self._to_host: dict[Node, None] = {}
        self._to_storage: dict[Node, None] = {}

    @property
    def may_have_any(self) -> bool:
        """Whether there may be something to write. O(1), because every step asks."""
        return bool(self._to_host or self._to_storage) or self._write_back

    def add(self, node: Node) -> None:
        """Queue the device blocks of `node` that the host does not have."""
        if self._enabled and len(node.host) < len(node.device) and not node.gone:
            self._to_host[node] = None

    def record_hit(self, node: Node) -> None:
        """A request found the path that ends with `node`."""
        if not self._enabled:
            return
        selective = self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        at: Node | None = node
        while at is not None:
            at.hits += 1
            if selective and at.hits >= self._select_hits:
                self.add(at)
            at = at.parent

    def add_path(self, node: Node) -> None:
        """Queue the path that ends with `node`, whatever the policy says."""
        at: Node | None = node
        while at is not None:
            self.add(at)
            at = at.parent

    def add_to_storage(self, node: Node) -> None:
        """Queue the host blocks of `node` that storage does not have."""
        if self._storage and len(node.host) and not node.gone:
            self._to_storage[node] = None

    def suspend(self, node: Node) -> None:
        """Write nothing more of `node` until it is used again.

        Called when all of it is being written, when there is no room for the rest, or when a
        write failed. Otherwise a tier that is too small or broken would be tried all the time.
        """
        self._to_host.pop(node, None)
        self._to_storage.pop(node, None)
        node.suspended_at = node.used

    def discard(self, nodes: Iterable[Node], tier: Tier) -> None:
        """`nodes` have no blocks in `tier` any more, so there is nothing to read."""
        queue = self._to_host if tier is Tier.DEVICE else self._to_storage
        if queue:
            for node in nodes:
                queue.pop(node, None)

    def divide(self, head: Node, tail: Node) -> None:
        """A node was split: the head is queued like the tail, each if it has blocks."""
        for queue, tier in ((self._to_host, Tier.DEVICE), (self._to_storage, Tier.HOST)):
            if tail in queue:
                on_device = tier is Tier.DEVICE
                if len(head.device if on_device else head.host):
                    queue[head] = None
                if not len(tail.device if on_device else tail.host):
                    del queue[tail]

    def host_candidates(self) -> Iterator[tuple[Node, bool]]:
        """Nodes with device blocks to write, and whether they are the next victims."""
        for node in list(self._to_host):
            if len(node.host) >= len(node.device):
                del self._to_host[node]
            elif not node.jobs:
                yield node, False
        if self._write_back:
            yield from ((node, True) for node in self._next_victims())

    def storage_candidates(self) -> Iterator[Node]:
        """Nodes with host blocks to write."""
        for node in list(self._to_storage):
            if node.num_stored >= len(node.host):
                del self._to_storage[node]
            elif not node.jobs:
                yield node

    def clear(self) -> None:
        """Empty the queue."""
        self._to_host.clear()
        self._to_storage.clear()

    def queued(self, tier: Tier) -> Iterable[Node]:
        """Nodes queued to be read from `tier`; for checks."""
        return self._to_host if tier is Tier.DEVICE else self._to_storage

    def _next_victims(self) -> list[Node]:
        """Unwritten nodes among the next victims of the device tier."""
        due: list[Node] = []
        # Free slots are used before any victim, so they count towards the distance.
        distance = self._device.pool.num_free
        for node in islice(self._device.order.victims(), self._write_ahead):
            if distance >= self._write_ahead:
                break
            distance += len(node.device)
            if len(node.host) >= len(node.device) or node.suspended_at == node.used:
                continue
            if not node.jobs:
                due.append(node)
        return due
