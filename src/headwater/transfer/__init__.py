"""Moves bytes between tiers: threads, no torch. What to move is decided elsewhere."""
