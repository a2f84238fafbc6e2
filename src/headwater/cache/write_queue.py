"""Which nodes are to be written down a tier: the write policy, as a list of wishes."""

from collections.abc import Iterator
from itertools import islice

from headwater.cache.config import CacheConfig
from headwater.cache.node import Node
from headwater.cache.tier_pool import TierPool
from headwater.types import WritePolicy


class WriteQueue:
    """Wishes, oldest first. A wish is dropped when there is nothing left to write."""

    def __init__(self, config: CacheConfig, device: TierPool) -> None:
        self._enabled = config.host_blocks > 0
        self.through = self._enabled and config.write_policy is WritePolicy.WRITE_THROUGH
        """Whether every commit is to be told to `want`."""
        self._asks_order = self._enabled and config.write_policy is WritePolicy.WRITE_BACK
        """Whether what is to be written is known only by the order of eviction."""
        self._storage = config.storage
        self._policy = config.write_policy
        self._select_hits = config.select_hits
        self._write_ahead = config.write_ahead_blocks
        self._device = device
        self._to_host: dict[Node, None] = {}
        self._to_storage: dict[Node, None] = {}

    @property
    def has_wishes(self) -> bool:
        """Whether there may be something to write; cheap, for every step asks."""
        return bool(self._to_host or self._to_storage) or self._asks_order

    def want(self, node: Node) -> None:
        """Write the device blocks of `node` that the host does not have."""
        if self._enabled and len(node.host) < len(node.device):
            self._to_host[node] = None

    def hit(self, node: Node) -> None:
        """A request found the path that ends with `node`."""
        if not self._enabled:
            return
        selective = self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        at: Node | None = node
        while at is not None:
            at.hits += 1
            if selective and at.hits >= self._select_hits:
                self.want(at)
            at = at.parent

    def save(self, node: Node) -> None:
        """Write the path that ends with `node`, whatever the policy says."""
        at: Node | None = node
        while at is not None:
            self.want(at)
            at = at.parent

    def landed_on_host(self, node: Node) -> None:
        """`node` got new host blocks."""
        if self._storage:
            self._to_storage[node] = None

    def settle(self, node: Node) -> None:
        """Nothing more of `node` is to be written until it is used again: all of it is being
        written, or there is no room for the rest, or writing failed. Without this, a tier that
        is too small or broken would keep the engine busy for ever."""
        self._to_host.pop(node, None)
        self._to_storage.pop(node, None)
        node.settled = node.used

    def for_host(self) -> Iterator[tuple[Node, bool]]:
        """Nodes with device blocks to write, and whether they are next to be evicted."""
        for node in list(self._to_host):
            if node.gone or len(node.host) >= len(node.device):
                del self._to_host[node]
            elif not node.jobs:
                yield node, False
        if self._asks_order:
            yield from ((node, True) for node in self._next_victims())

    def for_storage(self) -> Iterator[Node]:
        """Nodes with host blocks to write."""
        for node in list(self._to_storage):
            if node.gone or node.num_stored >= len(node.host):
                del self._to_storage[node]
            elif not node.jobs:
                yield node

    def clear(self) -> None:
        """Nothing is to be written any more."""
        self._to_host.clear()
        self._to_storage.clear()

    def _next_victims(self) -> list[Node]:
        """Unwritten nodes among the next victims of the device tier."""
        due: list[Node] = []
        seen = self._device.pool.num_free
        for node in islice(self._device.order.victims(), self._write_ahead):
            if seen >= self._write_ahead:
                break
            seen += len(node.device)
            if len(node.host) >= len(node.device) or node.settled == node.used:
                continue
            if not node.jobs:
                due.append(node)
        return due
