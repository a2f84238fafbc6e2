"""Buffers as numbers and as arrays: their addresses, and copies without the interpreter's lock."""

import numpy as np


def address_of(view: memoryview) -> int:
    """Where the first byte of a contiguous buffer is; the caller keeps the buffer alive."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copy between buffers of one size. A slice assignment would keep all other threads waiting
    for as long as it takes."""
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
