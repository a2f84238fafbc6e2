"""Every eviction policy by the name it has in settings; imported when asked for."""

from importlib import import_module

from headwater.cache.policy.base import Orders, Shape

POLICIES = {
    "arc": "headwater.cache.policy.arc",
    "lru": "headwater.cache.policy.lru",
    "s3fifo": "headwater.cache.policy.s3fifo",
    "session": "headwater.cache.shadow_comparison",
}
"""Where the `make_orders` of each policy is."""


def make_orders(name: str, shape: Shape) -> Orders:
    """The orders of one cache by the policy `name`."""
    orders: Orders = import_module(POLICIES[name]).make_orders(shape)
    return orders
