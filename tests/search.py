"""The length of property searches: seconds in the suite, hours in `scripts/nightly`."""

import os

from hypothesis import settings

SCALE = int(os.environ.get("HEADWATER_SEARCH_SCALE", "1"))
"""Multiplies the number of examples; above 1 the search is random, not the same each time."""


def search(*, examples: int, steps: int = 50) -> settings:
    """Settings of one search: `examples` runs of up to `steps` operations, times SCALE."""
    return settings(max_examples=examples * SCALE, stateful_step_count=steps)
