"""Benchmarks beside other engines, and the plan and the figures of `scripts/gpu`."""
