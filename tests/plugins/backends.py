"""Storage backends for plug-in tests, opened by name as users open their own."""

import shutil
import subprocess
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headwater.errors import StorageError
from headwater.storage.memory import MemoryStorage

SHARED: dict[str, Any] = {}
"""Memory that outlives the plug-in that opened it, by name, like storage of another process."""


class SharedMemory(MemoryStorage):
    """A store that several plug-ins open under one name."""

    hang: Event | None = None
    """While it is set and not released, calls do not return."""

    broken = False

    @classmethod
    def open(cls, settings, opening):
        rest = dict(settings)
        name = rest.pop("name")
        if name not in SHARED:
            SHARED[name] = super().open(rest, opening)
        store = SHARED[name]
        store._form = opening.format
        return store

    def contains(self, runs, *, timeout_s):
        self._meet_fault()
        return super().contains(runs, timeout_s=timeout_s)

    def read(self, keys, into, *, timeout_s):
        self._meet_fault()
        return super().read(keys, into, timeout_s=timeout_s)

    def write(self, keys, blocks, *, parents, timeout_s):
        self._meet_fault()
        return super().write(keys, blocks, parents=parents, timeout_s=timeout_s)

    def close(self):
        """Does nothing: other plug-ins still use the store."""

    def _meet_fault(self):
        if self.hang is not None:
            self.hang.wait()
        if self.broken:
            raise StorageError("switched off by the test")


def start_redis(port: int, folder: Path) -> "subprocess.Popen[bytes]":
    """A redis-server that keeps nothing; the test is skipped where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    command = [program, "--port", str(port), "--save", "", "--dir", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)
