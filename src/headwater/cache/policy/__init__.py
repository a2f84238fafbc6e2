"""Which node is evicted first: an order a policy, by name."""

from headwater.cache.policy.base import EvictionPolicy, Run, Turn
from headwater.cache.policy.registry import POLICIES

__all__ = ["POLICIES", "EvictionPolicy", "Run", "Turn"]
