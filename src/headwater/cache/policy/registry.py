"""Every eviction policy by the name it has in settings."""

from collections.abc import Callable
from typing import NamedTuple

from headwater.cache.policy.base import EvictionPolicy
from headwater.cache.policy.lru import Lru
from headwater.cache.policy.retention import Retention
from headwater.cache.policy.session import Session
from headwater.types import Tier


class Orders(NamedTuple):
    """The orders of the two local tiers; they may know things in common."""

    device: EvictionPolicy
    host: EvictionPolicy


def _lru(device_blocks: int, host_blocks: int, block_tokens: int) -> Orders:
    return Orders(Lru(), Lru())


def _session(device_blocks: int, host_blocks: int, block_tokens: int) -> Orders:
    retention = Retention(block_tokens)
    return Orders(Session(retention, Tier.DEVICE), Session(retention, Tier.HOST))


POLICIES: dict[str, Callable[[int, int, int], Orders]] = {"lru": _lru, "session": _session}
"""Makes the orders of a cache, from device blocks, host blocks and tokens a block."""
