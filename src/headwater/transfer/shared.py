"""Memory that other processes may read: a memfd, which has no name and is freed with its last
user.

A sealed memfd can neither shrink nor grow, and no process can map it writable any more. A
process that gets the descriptor can read the memory but cannot write to it.
"""

import fcntl
import mmap
import os
import weakref

from headwater.errors import ConfigError

_SEAL_FUTURE_WRITE = 0x10
"""The value in Linux since 5.1; Python's fcntl has a name for it only since 3.13."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals that keep the size of the memory: a process that reads removed memory is killed."""


class SharedPages:
    """One mapping that is writable here. The system allocates a page when it is first
    written."""

    def __init__(self, num_bytes: int, *, sealed: bool = True) -> None:
        """Unless `sealed`, other processes may map it writable until `seal` is called."""
        try:
            self.file = os.memfd_create("headwater", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, num_bytes)
            self._map = mmap.mmap(self.file, num_bytes)
            if sealed:
                self.seal()
        except (OSError, OverflowError, ValueError) as exc:
            raise ConfigError(f"{num_bytes:,} bytes of memory cannot be shared: {exc}") from exc
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self._map)
        """The whole mapping. It lives as long as this object, whatever other processes keep."""

    def seal(self) -> None:
        """Allow no new writable mapping in any process. Existing writable mappings stay."""
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE)


def map_writable(file: int, num_bytes: int) -> memoryview:
    """Map memory of another process of the same engine, before it is sealed."""
    return memoryview(mmap.mmap(file, num_bytes))


def map_shared(file: int, num_bytes: int) -> memoryview:
    """Map memory of another process read-only. Raises OSError if the memory could change its
    size."""
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise OSError("the memory is not sealed, so its owner could shrink it")
    if os.fstat(file).st_size < num_bytes:
        raise OSError("the memory is smaller than the sender announced")
    return memoryview(mmap.mmap(file, num_bytes, prot=mmap.PROT_READ))
