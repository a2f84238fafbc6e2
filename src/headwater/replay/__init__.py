"""Traces, and what a cache would have made of them. No torch."""
