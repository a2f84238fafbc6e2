"""Which node is evicted first: an order a policy, by name."""

from headwater.cache.policy.base import EvictionPolicy, Orders, Run, Turn
from headwater.cache.policy.registry import POLICIES, make_orders

__all__ = ["POLICIES", "EvictionPolicy", "Orders", "Run", "Turn", "make_orders"]
