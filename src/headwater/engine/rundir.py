"""A private folder for the sockets of one server: unique, mode 0700, removed even after a
crash.

The owner holds a file lock on its folder. The kernel releases the lock when the owner dies,
however it dies. So the next start can recognise abandoned folders and remove them.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "headwater-"
_LOCK = "lock"
_MAX_BASE_BYTES = 60
"""The path of a socket is limited to about 100 bytes; with a longer base, /tmp is used."""


class RunDir:
    """Owns a new folder until `close`."""

    def __init__(self, base: Path | None = None) -> None:
        base = base or _default_base()
        sweep(base)
        # The folder gets its name only when the lock is held, so a sweep never finds it
        # unlocked.
        young = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))
        self._lock_fd = os.open(young / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        self.path = base / young.name.removeprefix(".")
        young.rename(self.path)
        self._closed = False

    def address(self, life: int) -> str:
        """The address at which workers connect to the engine's life number `life`. Each life
        has its own address, so no message of one life reaches another."""
        return f"ipc://{self.path / f'engine-{life}'}"

    def close(self) -> None:
        """Remove the folder. Calling it twice is safe."""
        if not self._closed:
            self._closed = True
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)


def remove_socket_folder(address: str) -> None:
    """Remove the folder of `address`, for an engine whose supervisor died first."""
    folder = Path(address.removeprefix("ipc://")).parent
    if folder.name.startswith(_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def sweep(base: Path) -> int:
    """Remove folders in `base` whose owner is dead, and return their number."""
    return sum(_remove_if_abandoned(path) for path in base.glob(f"{_PREFIX}*"))


def _remove_if_abandoned(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if path.is_symlink() or path.stat().st_uid != os.getuid():
            return False
        lock_fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            return True
        finally:
            os.close(lock_fd)
    return False


def _default_base() -> Path:
    base = Path(tempfile.gettempdir())
    return base if len(os.fsencode(base)) <= _MAX_BASE_BYTES else Path("/tmp")
