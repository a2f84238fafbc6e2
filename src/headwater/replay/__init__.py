"""Replays traces with simulated caches and engines. No torch."""
