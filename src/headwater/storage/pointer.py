"""Addresses of buffers, for calls that take them as numbers."""

import numpy as np


def address_of(view: memoryview) -> int:
    """Where the first byte of a contiguous buffer is; the caller keeps the buffer alive."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address
