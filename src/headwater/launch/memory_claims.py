"""Main memory that starting engines of this machine have chosen for their host tiers.

A host tier on a GPU is a share of the free memory, and all of it is allocated at start. Engines that
start together would all see the same memory as free and together take more than there is. The
system would then kill one of them. So each engine writes down what it has chosen, until its memory
is allocated and no longer free:

    lock the folder ── free − claims of others ──▶ size ── claim ── unlock ── allocate ── withdraw

The owner of a claim keeps its file locked. The kernel releases the lock when the owner dies,
and the next reader removes the file. An engine waits only for a limited time for the lock of
the folder: otherwise one stopped process would stop all later starts. Engines of other users or
with another temporary folder are not seen.
"""

import fcntl
import logging
import os
import secrets
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from headwater.clock import SystemClock

log = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 30.0
"""Time to wait for other engines that choose. Each of them takes milliseconds."""

_LOCK = "lock"
_LOCK_POLL_S = 0.02
_FLAGS = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Claim:
    """Memory that this engine will allocate. The claim ends, at the latest, with this object or
    with the process."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        file = os.open(path, _FLAGS | os.O_EXCL, 0o600)
        self._end = weakref.finalize(self, _end, path, file)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, b"%d" % num_bytes)

    def withdraw(self) -> None:
        """End the claim: the memory is allocated, or will not be. Calling it twice is safe."""
        self._end()


class Claims:
    """The claims of a folder. While the folder is locked, no other engine chooses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_bytes = sum(
            _living_bytes(path) for path in folder.iterdir() if path.name != _LOCK
        )
        """Bytes that other engines have chosen and not allocated yet."""

    def add(self, num_bytes: int) -> Claim:
        """Claim memory for this engine."""
        return Claim(self._folder / secrets.token_hex(8), num_bytes)


@contextmanager
def open_claims(
    folder: Path | None = None, *, timeout_s: float = _LOCK_TIMEOUT_S
) -> Iterator[Claims | None]:
    """A context with the claims of this machine, in which no other engine chooses. Waits at
    most `timeout_s` for an engine that chooses now, then continues without the lock. Gives None
    if the folder cannot be used."""
    try:
        folder = folder or _default_folder()
        lock = os.open(folder / _LOCK, _FLAGS, 0o600)
    except OSError as error:
        log.warning("engines that start together may choose the same memory: reason=%s", error)
        yield None
        return
    try:
        if not _lock(lock, timeout_s):
            log.warning(
                "another engine takes too long to choose its memory; both may choose the same: "
                "folder=%s waited_s=%g",
                *(folder, timeout_s),
            )
        yield Claims(folder)
    finally:
        os.close(lock)


def _lock(file: int, timeout_s: float) -> bool:
    clock = SystemClock()
    end_s = clock.now() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.now() >= end_s:
                return False
            Event().wait(_LOCK_POLL_S)
        else:
            return True


def _end(path: Path, file: int) -> None:
    path.unlink(missing_ok=True)
    os.close(file)


def _living_bytes(path: Path) -> int:
    """Bytes of a claim; 0 if its owner is dead, and then it is removed."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # withdrawn meanwhile
        return 0
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.read(file, 32) or 0)
    else:
        path.unlink(missing_ok=True)
        return 0
    finally:
        os.close(file)


def _default_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"headwater-memory-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user")
    return folder
