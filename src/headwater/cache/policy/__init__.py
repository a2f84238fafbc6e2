"""Which node is evicted first: an order a policy, by name."""

from headwater.cache.policy.base import (
    EvictionPolicy,
    FinishedRequest,
    Hint,
    MarkedRun,
    Orders,
    Shape,
)
from headwater.cache.policy.registry import POLICIES, make_orders

__all__ = [
    "POLICIES",
    "EvictionPolicy",
    "FinishedRequest",
    "Hint",
    "MarkedRun",
    "Orders",
    "Shape",
    "make_orders",
]
