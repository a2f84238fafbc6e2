"""Attaching blocks to a node in a tier: the one place where a node gains blocks by transfer."""

import numpy as np

from headwater.cache.evictor import Evictor
from headwater.cache.kv_event_log import KVEventLog
from headwater.cache.node import Node
from headwater.cache.tier_pool import TierPool
from headwater.types import Slots, Tier


class Residency:
    """Adds to what a node has in a tier, keeping its parent's counts and the orders true."""

    def __init__(
        self, host: TierPool, evictor: Evictor, events: KVEventLog | None = None
    ) -> None:
        self._host = host
        self._evictor = evictor
        self._events = events

    def attach(self, node: Node, tier: Tier, start: int, count: int, slots: Slots) -> bool:
        """`node` has blocks [start, start + count) of its run in `tier` now.

        False, and no change, when they do not follow what it has there: it is gone, or
        somebody else was faster.
        """
        if node.gone or node.parent is None:
            return False
        if tier is Tier.DEVICE:
            attached = self._attach_device(node, node.parent, start, slots)
        elif tier is Tier.HOST:
            attached = self._attach_host(node, node.parent, start, slots)
        else:
            attached = node.num_stored == start
            if attached:
                node.num_stored = start + count
        if attached and self._events is not None:
            self._events.stored(node, tier, start, start + count)
        return attached

    def touch_host(self, node: Node, *, now: float) -> None:
        """Make the path that ends with `node` the most recent of the host tier."""
        at: Node | None = node
        while at is not None:
            if len(at.host) and not at.jobs and not at.gone:
                if at in self._host.order:
                    self._host.discard(at)
                self._host.add(at, now)
            at = at.parent

    def _attach_device(self, node: Node, parent: Node, start: int, slots: Slots) -> bool:
        if len(node.device) != start or len(parent.device) != parent.num_blocks:
            return False
        if not start:
            parent.device_children += 1
            self._evictor.stored_only.pop(node, None)
        node.device = np.concatenate((node.device, slots))
        return True

    def _attach_host(self, node: Node, parent: Node, start: int, slots: Slots) -> bool:
        above = max(len(parent.device), len(parent.host))
        if len(node.host) != start or above != parent.num_blocks:
            return False
        if not start:
            parent.host_children += 1
            self._evictor.stored_only.pop(node, None)
        node.host = np.concatenate((node.host, slots))
        return True
