"""A local tier: its pool of slots, and the order in which its nodes would be evicted."""

from headwater.cache.node import Node
from headwater.cache.policy import EvictionPolicy
from headwater.cache.pool import SlotPool
from headwater.types import Tier


class TierPool:
    """Slots and eviction order of the device or the host tier."""

    __slots__ = ("duplicates", "evictable", "evicted", "order", "pool", "tier")

    def __init__(self, tier: Tier, num_slots: int, order: EvictionPolicy) -> None:
        self.tier = tier
        self.pool = SlotPool(num_slots)
        self.order = order
        self.evictable = 0
        """Blocks of the nodes in the order."""
        self.duplicates: dict[Node, None] = {}
        """Of the host tier: nodes in the order whose host blocks are also on the device and are
        not evicted there soon. They leave a full host tier first; see `eviction_window`."""
        self.evicted = 0
        """Blocks evicted from this tier since the start."""

    def blocks(self, node: Node) -> int:
        """Blocks of `node` in this tier."""
        return len(node.device if self.tier is Tier.DEVICE else node.host)

    def add(self, node: Node, now: float, *, cold: bool = False) -> None:
        """Make `node` evictable: last in the order, or first when `cold`."""
        if cold:
            self.order.add_cold(node, now)
        else:
            self.order.add(node, now)
        self.evictable += self.blocks(node)

    def discard(self, node: Node) -> None:
        """`node` must not be evicted any more."""
        self.order.discard(node)
        self.duplicates.pop(node, None)
        self.evictable -= self.blocks(node)

    def mark_duplicate(self, node: Node) -> None:
        """The host blocks of `node` are also on the device and stay there for now."""
        if 0 < len(node.host) <= len(node.device) and node in self.order:
            self.duplicates[node] = None
