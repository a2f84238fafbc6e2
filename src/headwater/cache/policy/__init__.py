"""Which node is evicted first: an order a policy, by name."""

from headwater.cache.policy.base import EvictionPolicy, Hint, Orders, Run, Shape, Turn
from headwater.cache.policy.registry import POLICIES, make_orders

__all__ = [
    "POLICIES",
    "EvictionPolicy",
    "Hint",
    "Orders",
    "Run",
    "Shape",
    "Turn",
    "make_orders",
]
