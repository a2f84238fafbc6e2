"""The part of the device tier that is evicted next, and what it decides about host copies.

Device and host together should hold what one pool of their joint size would hold. Two rules
achieve that:

    eviction order of the device    next victims                       most recently used
                                    |<---- window ---->|
    host copy                       must exist         is a duplicate: it leaves a full host first

1. Blocks inside the window are written to the host before they are evicted from the device.
2. A host copy of a block outside the window is a duplicate. It takes room from a block that is
   in no other tier, so it is the first to leave a full host tier.

When the window contains every evictable block (the device is full of running requests), a request
that ends is written at once, because its blocks may be evicted by the next admission.
"""

from collections.abc import Iterator

from headwater.cache.config import CacheConfig
from headwater.cache.node import Node
from headwater.cache.tier_pool import TierPool
from headwater.types import WritePolicy

_SHARE = 8
"""One device block in this many is inside the window. The window has to hold what one burst of
admissions evicts; a larger one keeps more duplicates."""

_BURSTS = 4
"""The device is full of running requests when so many bursts of admissions would evict all else:
those that come while one is being written. With two, sessions that do not fit on the device found
0.91 of what they could, with four 0.96."""

_BURST_MEMORY = 0.99
"""What a burst keeps of itself with each later step that takes blocks."""

_LOOKS = 16
"""The window is searched again when one part in this many of it was used up."""

_POLICIES = (WritePolicy.AUTO, WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK)


class EvictionWindow:
    """Knows which device blocks are evicted next. Reads the device order, changes nothing in it."""

    def __init__(self, config: CacheConfig, device: TierPool) -> None:
        self.is_enabled = config.host_blocks > 0 and config.write_policy in _POLICIES
        """Whether blocks are written before they are evicted, under this write policy."""
        ahead = config.write_ahead_blocks
        self.num_blocks = max(config.device_blocks // _SHARE, 1) if ahead is None else ahead
        self._device = device
        self._burst = 0.0
        """Blocks that the admissions of one step took lately, at most."""
        self._used_before = self._used
        self._searched_at: int | None = None
        """Blocks used up when the window was last searched."""

    def measure_step(self) -> None:
        """Measure how many blocks were taken since the last call. Called once a step."""
        used = self._used
        taken, self._used_before = used - self._used_before, used
        if taken > 0:  # a step that takes nothing changes nothing: replay skips such steps
            self._burst = max(taken, self._burst * _BURST_MEMORY)

    @property
    def has_everything(self) -> bool:
        """Whether every evictable device block may be evicted soon: they are inside the window, or
        the next bursts of admissions take them."""
        device = self._device
        soon = max(self.num_blocks, _BURSTS * self._burst)
        return device.pool.num_free + device.evictable < soon

    @property
    def is_due(self) -> bool:
        """Whether the window should be searched for unwritten nodes. O(1)."""
        if not self.is_enabled or self._device.pool.num_free >= self.num_blocks:
            return False
        used = self._used
        if self._searched_at is None:
            return True
        self._searched_at = min(self._searched_at, used)
        return used - self._searched_at >= max(self.num_blocks // _LOOKS, 1)

    def nodes(self) -> Iterator[Node]:
        """Nodes inside the window, first victim first."""
        # Free slots are used before any victim, so they count towards the distance.
        distance = self._device.pool.num_free
        for node in self._device.order.victims():
            if distance >= self.num_blocks:
                return
            distance += len(node.device)
            yield node

    def finish_search(self) -> None:
        """All nodes of the window are written or being written."""
        self._searched_at = self._used

    @property
    def _used(self) -> int:
        """Grows by one with each device block that is taken."""
        return self._device.evicted - self._device.pool.num_free
