"""Triton kernels over the block pool and over rows of activations.

Each module has one or two kernels and the function that launches them. Nothing here allocates
memory that a captured graph could not keep, and nothing waits for the device.
"""
