"""Storage backends for plug-in tests, opened by name as users open their own."""

import os
from pathlib import Path
from threading import Event
from typing import Any

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


def end_hanging_calls():
    """Let the calls of every shared store return, so that its plug-ins can be closed."""
    for store in SHARED.values():
        if store.hang is not None:
            store.hang.set()


def damage_slabs(folder: Path, damage: str) -> None:
    """Truncate the slab files of a store, or flip a bit in each of their blocks and none in their
    headers."""
    slabs = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 1e6]
    assert slabs
    for slab in slabs:
        if damage == "truncate":
            os.truncate(slab, slab.stat().st_size // 2)
            continue
        raw = bytearray(slab.read_bytes())
        for at in range(4096 + 512, len(raw), 1024):
            raw[at] ^= 1
        slab.write_bytes(raw)
