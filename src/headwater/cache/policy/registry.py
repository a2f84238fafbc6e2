"""All eviction policies, by their names in settings. A policy is imported on first use."""

from importlib import import_module

from headwater.cache.policy.base import Orders, Shape

POLICIES = {
    "arc": "headwater.cache.policy.arc",
    "lru": "headwater.cache.policy.lru",
    "s3fifo": "headwater.cache.policy.s3fifo",
    "session": "headwater.cache.shadow_comparison",
}
"""For each policy, the module whose `make_orders` creates it."""


def make_orders(name: str, shape: Shape) -> Orders:
    """The orders of one cache under the policy `name`."""
    orders: Orders = import_module(POLICIES[name]).make_orders(shape)
    return orders
