"""The write queue: which nodes are to be copied to a lower tier, by the write policy.

Bound: a queued node is in the tree and has blocks in the tier that is read. The evictor removes
a node from the queue together with its blocks, so the queue never outgrows the tree.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headwater.cache.config import CacheConfig
from headwater.cache.eviction_window import EvictionWindow
from headwater.cache.node import Node
from headwater.cache.storage_queue import StorageQueue
from headwater.cache.tier_pool import TierPool
from headwater.types import Tier, WritePolicy


class HostWrite(NamedTuple):
    """A node whose device blocks are to be written to the host."""

    node: Node
    may_evict: bool
    """Whether host blocks may be evicted for it."""

    is_next_victim: bool = False
    """Whether the device evicts it next; after the write it is the next victim again."""


class WriteQueue:
    """Nodes with blocks to write, oldest first. A node leaves when nothing is left to write."""

    def __init__(self, config: CacheConfig, window: EvictionWindow, host: TierPool) -> None:
        self._enabled = config.host_blocks > 0
        self.through = self._enabled and config.write_policy in (
            WritePolicy.AUTO,
            WritePolicy.WRITE_THROUGH,
        )
        """Whether every commit has to be queued with `add_committed`."""
        self._storage = config.storage
        self._policy = config.write_policy
        self._select_hits = config.select_hits
        self.window = window
        self._host = host
        self._to_host: dict[Node, bool] = {}
        """Each with whether host blocks may be evicted for it."""
        self._to_storage = StorageQueue(self.add, by_reuse=config.storage_order == "reuse")

    @property
    def may_have_any(self) -> bool:
        """Whether there may be something to write. O(1); asked once a step."""
        self.window.measure_step()
        return bool(self._to_host) or self._to_storage.may_have_any or self.window.is_due

    def add(self, node: Node) -> None:
        """Queue the device blocks of `node` that the host does not have."""
        if self._enabled and len(node.host) < len(node.device) and not node.gone:
            self._to_host[node] = True

    def add_committed(self, node: Node) -> None:
        """`node` got new device blocks. Under `auto` they only fill free host slots: evicting
        for them would replace a block that is in no other tier by a duplicate."""
        if self._policy is not WritePolicy.AUTO:
            self.add(node)
        elif self._host.pool.num_free and len(node.host) < len(node.device):
            self._to_host.setdefault(node, False)

    def add_finished(self, node: Node, now: float) -> None:
        """A request that used the path to `node` ended, and its blocks may be evicted soon."""
        if self.window.is_enabled and self.window.has_everything:
            self.add_path(node)
        if self._storage:
            # The eviction policy has marked the path, so its chance of return is known now.
            at: Node | None = node
            while at is not None:
                self._to_storage.add(at, now)
                at = at.parent

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
        """Queue the path that ends with `node`, whatever the policy says.

        The root side first: a block on the host is of no use without those before it.
        """
        path: list[Node] = []
        at: Node | None = node
        while at is not None:
            path.append(at)
            at = at.parent
        for each in reversed(path):
            self.add(each)

    def add_to_storage(self, node: Node, now: float) -> None:
        """Queue the host blocks of `node` that storage does not have."""
        if self._storage:
            self._to_storage.add(node, now)

    def next_to_store(self) -> Node | None:
        """The node whose host blocks are to be written to storage next."""
        return self._to_storage.pop()

    def resume(self, node: Node) -> None:
        """A job of `node` ended, so that it can be written."""
        if self._storage:
            self._to_storage.resume(node)

    def suspend(self, node: Node) -> None:
        """Write nothing more of `node` until it is used again.

        Called when all of it is being written, when there is no room for the rest, or when a
        write failed. Otherwise a tier that is too small or broken would be tried all the time.
        """
        self._to_host.pop(node, None)
        node.suspended_at = node.used

    def suspend_storage(self, node: Node) -> None:
        """A write to storage failed: write nothing more of `node` until it is used again."""
        self._to_storage.discard((node,))

    def drop(self, node: Node) -> None:
        """There is no free host slot for `node`; it is written when it is a next victim."""
        self._to_host.pop(node, None)

    def discard(self, nodes: Iterable[Node], tier: Tier) -> None:
        """`nodes` have no blocks in `tier` any more, so there is nothing to read."""
        if tier is Tier.HOST:
            self._to_storage.discard(nodes)
        elif self._to_host:
            for node in nodes:
                self._to_host.pop(node, None)

    def divide(self, head: Node, tail: Node) -> None:
        """A node was split: the head is queued like the tail, each if it has blocks."""
        if tail in self._to_host:
            if len(head.device):
                self._to_host[head] = self._to_host[tail]
            if not len(tail.device):
                del self._to_host[tail]
        self._to_storage.divide(head, tail)

    def host_candidates(self) -> Iterator[HostWrite]:
        """Nodes with device blocks to write. Read to the end, nothing of the window is left."""
        for node, may_evict in list(self._to_host.items()):
            if len(node.host) >= len(node.device):
                self._to_host.pop(node, None)
            elif not node.jobs:
                yield HostWrite(node, may_evict=may_evict)
        if self.window.is_due:
            for node in self._unwritten_victims():
                yield HostWrite(node, may_evict=True, is_next_victim=True)
            self.window.finish_search()

    def clear(self) -> None:
        """Empty the queue."""
        self._to_host.clear()
        self._to_storage.clear()

    @property
    def is_bounded(self) -> bool:
        """Whether the queue of writes to storage is within its bound; for checks."""
        return self._to_storage.check_bounds()

    def queued(self, tier: Tier) -> Iterable[Node]:
        """Nodes queued to be read from `tier`; for checks."""
        return self._to_host if tier is Tier.DEVICE else self._to_storage

    def _unwritten_victims(self) -> list[Node]:
        """Unwritten nodes among the next victims of the device tier."""
        due: list[Node] = []
        duplicates = self._host.duplicates
        for node in self.window.nodes():
            duplicates.pop(node, None)  # its host copy will soon be the only one
            if len(node.host) >= len(node.device) or node.suspended_at == node.used:
                continue
            if not node.jobs:
                due.append(node)
        return due
