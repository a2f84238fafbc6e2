"""A directory of slabs that several processes share: ownership of slabs, and the limit on their size.

A process holds an exclusive `flock` on the file `lock` while it makes, takes over or deletes a
slab; the system releases the lock when the process dies. So an incomplete slab that is found
under the lock was left by a process that was killed; it is removed.
"""

import contextlib
import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from headwater.errors import ConfigError, StorageCorrupt
from headwater.storage.codec import BlockFormat
from headwater.storage.file.slab import Slab, slab_path
from headwater.storage.file.table import Entry, Geometry, OpenFile, Table, lock_file

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that mean that there is no room."""

_OURS = frozenset({".slab", ".table", ".new"})


class SlabDirectory:
    """One storage directory, as one process sees it."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self.path = path
        self._direct = direct
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & stat.S_IWOTH:
                # Blocks have a checksum, not a signature: any process that can write here could
                # forge them.
                raise ConfigError(
                    f"storage directory {path} is writable by all users (mode {mode:o}); run: "
                    f"chmod o-w {path}"
                )
            OpenFile(path / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(f"storage directory {path} cannot be used: {error}") from error

    def names(self) -> set[str]:
        """All slabs, with or without an owner."""
        return {
            name[: -len(".table")] for name in os.listdir(self.path) if name.endswith(".table")
        }

    def used_bytes(self) -> int:
        """Bytes of all slabs and tables, of every model and process."""
        return sum(_file_bytes(path) for path in self.path.iterdir() if path.suffix in _OURS)

    def bytes_of(self, name: str) -> int:
        """Bytes of one slab and its table; 0 if it is gone."""
        path = self.path / f"{name}.table"
        return _file_bytes(path) + _file_bytes(slab_path(path))

    def written_at_s(self, name: str) -> float:
        """When the table of a slab last changed; 0 if it is gone."""
        try:
            return (self.path / f"{name}.table").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def create(
        self, geometry: Geometry, *, capacity_bytes: int, reserve_bytes: int
    ) -> Slab | None:
        """A new slab of ours, or None if the directory has no room for it.

        Raises OSError, with an error number of `FULL` if less than `reserve_bytes` of the disk
        would stay free.
        """
        with self._locked():
            self._sweep()
            if not self._make_room(geometry.total_bytes, capacity_bytes):
                return None
            disk = os.statvfs(self.path)
            if disk.f_bavail * disk.f_frsize < geometry.total_bytes + reserve_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            name = f"{uuid.uuid4().hex}.table"
            return Slab.create(self.path / name, geometry, direct=self._direct)

    def adopt(self, form: BlockFormat, known: set[str]) -> list[Slab]:
        """Take over the slabs of this format whose owners are dead, except those in `known`."""
        adopted = []
        with self._locked():
            self._sweep()
            for name in sorted(self.names() - known):
                slab = self._open(name, writable=True)
                if slab is not None and slab.geometry.form == form and slab.table.own():
                    adopted.append(slab)
        return adopted

    def peek(self, name: str) -> Slab | None:
        """Another process's slab, for reading; None if it is gone or damaged."""
        return self._open(name, writable=False)

    def is_owned(self, name: str) -> bool:
        """Whether a living process owns a slab."""
        with self._locked():
            try:
                return not lock_file(OpenFile(self.path / f"{name}.table", os.O_RDWR))
            except FileNotFoundError:
                return False

    def prune(self, name: str) -> bool:
        """Delete a slab that has no owner; False if a living process owns it."""
        with self._locked():
            return self._delete_dead(name)

    def free_slot(self, name: str, entry: Entry) -> bool:
        """Forget a block of a slab that has no owner; False if a living process owns it."""
        with self._locked():
            try:
                table = Table(self.path / f"{name}.table", writable=True)
            except (OSError, StorageCorrupt):
                return False
            if not table.own() or table.at(entry.slot) != entry:
                return False
            table.clear(entry.slot)
            return True

    def _make_room(self, wanted_bytes: int, capacity_bytes: int) -> bool:
        """Whether there is room; slabs without an owner are deleted to make room."""
        used = self.used_bytes()
        dead = sorted(self.names(), key=self.written_at_s)
        while used + wanted_bytes > capacity_bytes and dead:
            if self._delete_dead(dead.pop(0)):
                used = self.used_bytes()
        return used + wanted_bytes <= capacity_bytes

    def _delete_dead(self, name: str) -> bool:
        path = self.path / f"{name}.table"
        try:
            file = OpenFile(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        if not lock_file(file):
            return False
        path.unlink(missing_ok=True)
        slab_path(path).unlink(missing_ok=True)
        return True

    def _open(self, name: str, *, writable: bool) -> Slab | None:
        try:
            table = Table(self.path / f"{name}.table", writable=writable)
            return Slab(table, owned=writable, direct=self._direct)
        except (OSError, StorageCorrupt):
            return None

    def _sweep(self) -> None:
        """Remove slabs that a killed process left incomplete or half-deleted."""
        for path in self.path.glob("*.new"):
            path.unlink(missing_ok=True)
        tables = self.names()
        for path in self.path.glob("*.slab"):
            if path.stem not in tables:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        file = OpenFile(self.path / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(file.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file.fd, fcntl.LOCK_UN)


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
