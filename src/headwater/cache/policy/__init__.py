"""Eviction policies: each is an order of eviction, chosen by name."""

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
