"""Python's cycle collector, told to keep out of the way of a loop that makes no cycles."""

import gc


def settle_collector() -> None:
    """Take everything that lives now out of the collector's sight, and let it run seldom.

    Nodes, leases and sequences are freed by reference count when they are let go; what the
    collector costs otherwise is a pause of a step every few hundred requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
