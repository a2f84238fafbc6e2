"""Moves bytes between tiers with threads, without torch. The cache and the scheduler decide
what to move."""
