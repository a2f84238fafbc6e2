"""Triton kernels over the block pool and over rows of activations.

Each module has one kernel or two and the function that launches them; nothing here allocates
what a captured graph could not keep, and nothing waits for the device.
"""
