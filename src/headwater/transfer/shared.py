"""Memory that another process may read: a memfd, which has no name and ends with its last user.

A sealed memfd can neither shrink nor grow, and no process can map it writable any more. A process
that gets its descriptor can read it and cannot write to it.
"""

import fcntl
import mmap
import os
import weakref

from headwater.errors import ConfigError

_SEAL_FUTURE_WRITE = 0x10
"""As Linux has it since 5.1; Python's fcntl has no name for it before 3.13."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What keeps memory from being taken away under a reader."""


class SharedPages:
    """One mapping, writable here; the system gives a page when it is first written."""

    def __init__(self, num_bytes: int, *, sealed: bool = True) -> None:
        """Unless `sealed`, others may map it writable until `seal` is called."""
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
        """All of it; as long-lived as this object, however long others keep theirs."""

    def seal(self) -> None:
        """No process can map it writable from now on; existing writable mappings stay."""
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, SEALS | _SEAL_FUTURE_WRITE)


def map_writable(file: int, num_bytes: int) -> memoryview:
    """Memory of another process of the same engine, before it is sealed."""
    return memoryview(mmap.mmap(file, num_bytes))


def map_shared(file: int, num_bytes: int) -> memoryview:
    """Memory of another process, read-only; OSError where it is none that stays as it is."""
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise OSError("it could be taken away")
    if os.fstat(file).st_size < num_bytes:
        raise OSError("it is smaller than it is said to be")
    return memoryview(mmap.mmap(file, num_bytes, prot=mmap.PROT_READ))
