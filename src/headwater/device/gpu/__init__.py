"""The device is an NVIDIA GPU: a runner over captured graphs, and copies beside it."""
