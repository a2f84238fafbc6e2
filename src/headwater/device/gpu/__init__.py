"""NVIDIA GPUs: a runner with captured graphs, and copies that run beside it."""
