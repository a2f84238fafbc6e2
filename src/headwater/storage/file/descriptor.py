"""A file descriptor that closes with its last reference.

A read or write in progress keeps its file open, and with it the lock of its owner:
another thread that lets go of a slab can neither close a descriptor under it nor let a third
process take the slab over while bytes may still be written to it.
"""

import os
from pathlib import Path


class OpenFile:
    """One open file."""

    __slots__ = ("fd",)

    def __init__(self, path: Path, flags: int, mode: int = 0o600) -> None:
        self.fd = -1
        self.fd = os.open(path, flags | os.O_CLOEXEC, mode)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
