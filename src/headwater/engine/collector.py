"""Settings of Python's cycle collector for a loop that creates no reference cycles."""

import gc


def settle_collector() -> None:
    """Exclude all existing objects from the cycle collector, and make it run rarely. Nodes,
    leases and sequences are freed by reference counting. Without this, the collector would
    pause a step every few hundred requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
