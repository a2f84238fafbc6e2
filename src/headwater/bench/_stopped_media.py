"""Storage media that can be stopped: they accept connections and answer nothing, until they
continue without loss.

A file system is stopped in two ways, because neither alone stops everything. A held lock blocks
each process that creates a slab or looks for slabs of others. Unanswered fanotify events block
each process that opens or reads a file; this needs CAP_SYS_ADMIN.
"""

import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Protocol

from headwater.bench._storage_media import start_mooncake, start_redis, start_server
from headwater.testing.ports import free_port

BACKENDS = ("memory", "file", "redis", "mooncake-master", "mooncake-peer")
_SLAB_BYTES = 8 << 20
"""Small, so that writes soon need a new slab, and with it the lock of the directory."""

_FAN_CLASS_CONTENT, _FAN_CLOEXEC, _FAN_MARK_ADD = 0x04, 0x01, 0x01
_FAN_PERMISSIONS = 0x10000 | 0x20000 | 0x08000000
"""fanotify flags: opening and reading the files of a directory wait for permission."""

_EVENT = "IBBHQii"
"""Fields of a fanotify event: length, version, reserved, length of this part, kind, descriptor,
process."""


class StoppableMedium(Protocol):
    """Where a backend keeps its blocks."""

    backend: str
    config: dict[str, Any]

    def stop(self) -> None:
        """Answer nothing from now on. Called from any thread; calling it twice is safe."""

    def hang(self) -> None:
        """Wait inside a call, if the medium is this process itself."""

    def go_on(self) -> None:
        """Answer again, including the calls that came meanwhile."""


class WaitingMedium:
    """This process: a named call itself waits."""

    def __init__(self) -> None:
        self.backend, self.config = "memory", dict[str, Any]()
        self._released = Event()

    def stop(self) -> None:
        return

    def hang(self) -> None:
        self._released.wait()

    def go_on(self) -> None:
        self._released.set()


class StoppableServer:
    """A server, stopped with SIGSTOP."""

    def __init__(
        self, backend: str, config: dict[str, Any], process: subprocess.Popen[bytes]
    ) -> None:
        self.backend, self.config = backend, config
        self._process = process

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def hang(self) -> None:
        return

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


class StoppableDirectory:
    """A directory whose lock is held and whose files are watched by fanotify while it is
    stopped."""

    def __init__(self, path: Path) -> None:
        self.backend = "file"
        self.config = {
            "path": str(path),
            "slab_bytes": _SLAB_BYTES,
            "capacity_bytes": 1 << 30,
            "reserve_bytes": 0,
        }
        path.mkdir(mode=0o700)
        self._path = path
        self._news = path / "stopped.table"
        self._lock = Lock()
        self._held: list[int] = []
        # Before the backend opens its files: a file that was opened earlier has no such events.
        self._permissions = _Permissions(path)

    def stop(self) -> None:
        with self._lock:
            if self._held:
                return
            lock = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            self._held.append(lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._news.touch()
            self._permissions.stop()

    def hang(self) -> None:
        return

    def go_on(self) -> None:
        with self._lock:
            self._permissions.close()
            if not self._held:
                return
            self._news.unlink(missing_ok=True)
            os.close(self._held.pop())


class _Permissions:
    """Makes every open and read in a directory wait for an answer of a thread in this process."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = _FAN_CLASS_CONTENT | _FAN_CLOEXEC
        self._group: int = libc.fanotify_init(flags, os.O_RDONLY)
        marked = self._group >= 0 and not libc.fanotify_mark(
            *(self._group, _FAN_MARK_ADD, ctypes.c_uint64(_FAN_PERMISSIONS)),
            *(-1, os.fsencode(path)),
        )
        if not marked:
            raise PermissionError(
                "a file system can be stopped only with CAP_SYS_ADMIN (fanotify); leave `file` "
                f"out with --backends: {os.strerror(ctypes.get_errno())}"
            )
        self._goes_on = Event()
        self._goes_on.set()
        Thread(target=self._allow, name="file-permissions", daemon=True).start()

    def stop(self) -> None:
        """Answer nothing; calls that are open in the kernel wait until `close`."""
        self._goes_on.clear()

    def close(self) -> None:
        """Allow everything from now on."""
        self._goes_on.set()

    def _allow(self) -> None:
        while True:
            events = os.read(self._group, 4096)
            self._goes_on.wait()
            while events:
                size, _, _, _, _, descriptor, _ = struct.unpack_from(_EVENT, events)
                os.write(self._group, struct.pack("iI", descriptor, 1))
                os.close(descriptor)
                events = events[size:]


@contextmanager
def open_medium(name: str, folder: Path) -> Iterator[StoppableMedium | None]:
    """A new medium; None if its server is not installed."""
    with ExitStack() as stack:
        medium = _open(name, folder, stack)
        yield medium
        if medium is not None:
            medium.go_on()


def _open(name: str, folder: Path, stack: ExitStack) -> StoppableMedium | None:
    if name == "memory":
        return WaitingMedium()
    if name == "file":
        return StoppableDirectory(folder / "blocks")
    if name == "redis":
        redis = start_redis(folder, stack)
        return redis and StoppableServer(name, {"url": redis.address}, redis.process)
    master = start_mooncake(stack)
    if master is None:
        return None
    settings = {"master": master.address, "segment_bytes": 0, "join_timeout_s": 1.0}
    peer = _start_peer(master.address, stack)
    stopped = master.process if name == "mooncake-master" else peer
    return StoppableServer("mooncake", settings, stopped)


def _start_peer(master: str, stack: ExitStack) -> subprocess.Popen[bytes]:
    """A process that lends memory to the pool."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("mooncake_client")), "--host=127.0.0.1"]
    command += [f"--port={port}", "--metadata_server=P2PHANDSHAKE"]
    command += [f"--master_server_address={master}", "--global_segment_size=1 GB"]
    return stack.enter_context(start_server([*command, "--local_buffer_size=16 MB"], port))
