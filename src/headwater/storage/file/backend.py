"""Blocks in slab files of one directory. It needs no other software.

Each process writes only to slabs that it owns and reads all slabs. It verifies every block
after reading, because another owner may reuse a slot while it is being read. A process may be
killed at any instant: a block is found only when it is whole, and the next process that opens
the directory takes the slabs over. There is no `fsync`: after a power cut a block may be lost
or damaged, and is then a miss.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Self, TypeVar

from headwater.clock import Clock
from headwater.errors import ConfigError, StorageCorrupt, StorageError
from headwater.storage.base import BlockRead, BlockWrite, Opening, StorageStats, leading
from headwater.storage.calls import Deadline, StorageCounters
from headwater.storage.codec import BlockFormat
from headwater.storage.file.directory import FULL, SlabDirectory
from headwater.storage.file.index import SlotEntry, SlotIndex
from headwater.storage.file.slab import Slab
from headwater.storage.file.table import Geometry
from headwater.storage.io_threads import IoThreads
from headwater.storage.settings import read_settings
from headwater.types import BlockKey

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 10.0
"""Seconds after which the backend checks again whether a full directory has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileConfig:
    """Settings of the `file` backend."""

    path: str
    """Directory of the slabs; created if it is missing. Several processes may share it."""

    capacity_bytes: int = 16 << 30
    """Maximum number of bytes that all slabs in the directory may take together."""

    slab_bytes: int = 256 << 20
    """Bytes of one slab file, allocated at once; smaller if the capacity is smaller."""

    reserve_bytes: int = 1 << 30
    """Bytes of the disk that stay free, whatever the capacity is."""

    num_threads: int = 4
    """Reads and writes in flight at once."""

    direct: bool = True
    """Bypass the page cache if the file system supports it."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("storage backend 'file' needs the setting path, a directory")
        if self.num_threads < 1:
            raise ConfigError(f"num_threads must be positive, got {self.num_threads}")
        if self.slab_bytes < 1 or self.reserve_bytes < 0:
            raise ConfigError(
                f"slab_bytes must be positive and reserve_bytes not negative, got "
                f"{self.slab_bytes} and {self.reserve_bytes}"
            )

    def geometry(self, form: BlockFormat) -> Geometry:
        """The size of slabs within the capacity. Raises ConfigError if not even one block
        fits."""
        wanted = min(self.slab_bytes, self.capacity_bytes)
        num_slots = max(1, wanted // Geometry(form, 1).slot_bytes)
        while num_slots > 1 and Geometry(form, num_slots).total_bytes > wanted:
            num_slots -= 1
        geometry = Geometry(form, num_slots)
        if geometry.total_bytes > self.capacity_bytes:
            raise ConfigError(
                f"capacity_bytes is {self.capacity_bytes}, but a slab of one block takes "
                f"{geometry.total_bytes}; raise capacity_bytes"
            )
        return geometry


class FileStorage:
    """Content-addressed blocks in slabs. `headwater storage` shows what a directory holds."""

    def __init__(self, config: FileConfig, form: BlockFormat, clock: Clock) -> None:
        self._config = config
        self._form = form
        self._clock = clock
        self._geometry = config.geometry(form)
        self._directory = SlabDirectory(Path(config.path), direct=config.direct)
        self._index = SlotIndex()
        self._counters = StorageCounters("file", form.block_bytes)
        self._io_threads = IoThreads("file storage", config.num_threads)
        self._growing = Lock()
        self._full_until_s = float("-inf")
        self._full_reason = "no_room"
        """Why there was no new slab: `no_room` in the directory, or `disk_full`."""
        self._refreshing = Lock()
        self._names: set[str] = set()
        self._theirs: dict[str, Slab] = {}
        self._refresh()

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        config = read_settings(FileConfig, settings, "file")
        try:
            return cls(config, opening.format, opening.clock)
        except OSError as error:
            raise ConfigError(
                f"storage directory {config.path} cannot be used: {error}"
            ) from error

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        keys = [key for run in runs for key in run]
        self._look(keys, self._deadline(timeout_s))
        return leading(runs, self._index.found(keys))

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        self._form.check(into)
        deadline = self._deadline(timeout_s)
        self._look(keys, deadline)
        calls = [partial(self._read, *one) for one in zip(keys, into, strict=True)]
        outcomes = self._run(calls, deadline)
        self._index.touch(keys)
        return self._counters.count_reads(outcomes)

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        self._form.check(blocks)
        deadline = self._deadline(timeout_s)
        self._look(keys, deadline)
        calls = [partial(self._write, *one) for one in zip(keys, blocks, parents, strict=True)]
        outcomes = self._run(calls, deadline)
        self._index.touch(keys)
        return self._counters.count_writes(outcomes)

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        """Remove blocks in our own slabs. Other processes remove theirs."""
        deadline = self._deadline(timeout_s)
        if keys is None:
            self._run([self._refresh], deadline)
            keys = self._index.our_keys()
        [removed] = self._run([partial(self._remove, keys)], deadline)
        return removed

    def stats(self) -> StorageStats:
        return self._counters.stats(
            num_blocks=self._index.num_blocks,
            used_bytes=sum(slab.geometry.total_bytes for slab in self._index.slabs),
            capacity_bytes=self._config.capacity_bytes,
            threads_lost=self._io_threads.num_lost,
        )

    def close(self) -> None:
        """Give up ownership: another process may take the slabs over at once."""
        self._io_threads.close()
        self._index.clear()
        self._theirs.clear()

    def check(self) -> None:
        """Raise AssertionError if a slot is lost or has two states."""
        self._index.check()

    def _deadline(self, timeout_s: float) -> Deadline:
        return Deadline(self._clock, timeout_s, "file storage")

    def _run(self, calls: Sequence[Callable[[], T]], deadline: Deadline) -> list[T]:
        try:
            return self._io_threads.run(calls, timeout_s=deadline.left_s())
        except OSError as error:
            self._counters.count_failure("io_error")
            raise StorageError(f"{self._directory.path}: {error}") from error

    def _look(self, keys: Sequence[BlockKey], deadline: Deadline) -> None:
        """Learn what other processes have written, if that could change the result."""
        if not self._index.all_ours(keys):
            self._run([self._refresh], deadline)

    def _read(self, key: BlockKey, into: memoryview) -> BlockRead:
        place = self._index.lease(key)
        if place is None:
            return BlockRead.ABSENT
        try:
            place.slab.read(place.entry, into)
        except StorageCorrupt as error:
            if place.slab.table.at(place.entry.slot) == place.entry:
                self._give_up(place, error.reason)
                return BlockRead.DAMAGED
            self._index.forget(place)  # its owner reused the slot while we read it
            return BlockRead.ABSENT
        except OSError as error:
            self._give_up(place, "io_error")
            raise StorageError(f"cannot read {place.slab.path}: {error}") from error
        finally:
            self._index.release(place)
        return BlockRead.READ

    def _give_up(self, place: SlotEntry, reason: str) -> None:
        """Count an unusable block and remove it from the index."""
        self._counters.count_failure(reason)
        if place.slab.owned:
            place.slab.table.clear(place.entry.slot)
        self._index.forget(place)

    def _write(self, key: BlockKey, block: memoryview, parent: BlockKey) -> BlockWrite:
        if not self._index.claim(key):
            return BlockWrite.PRESENT
        try:
            reason = self._store(key, block, parent)
        except OSError as error:
            reason = "disk_full" if error.errno in FULL else "io_error"
            if error.errno not in FULL:
                raise StorageError(
                    f"cannot write to {self._directory.path}: {error}"
                ) from error
        finally:
            self._index.unclaim(key)
        if reason is None:
            return BlockWrite.WRITTEN
        self._counters.count_failure(reason)
        return BlockWrite.REFUSED

    def _store(self, key: BlockKey, block: memoryview, parent: BlockKey) -> str | None:
        """Write a claimed block. Returns the reason if it was refused."""
        place = self._take(key, parent)
        if place is None:
            return self._full_reason
        try:
            place.slab.write(place.entry, block)
        except OSError:
            self._index.abandon(place)
            raise
        if not self._index.commit(place):
            self._drop_copy(place)
        return None

    def _drop_copy(self, copy: SlotEntry) -> None:
        """Free a slot whose block is also in another slot."""
        copy.slab.table.clear(copy.entry.slot)
        self._index.abandon(copy)

    def _take(self, key: BlockKey, parent: BlockKey) -> SlotEntry | None:
        """Take a slot: a free one, one of a new slab, or the least recently used."""
        place, _ = self._index.take(key, parent, evict=False)
        if place is None and self._grow():
            place, _ = self._index.take(key, parent, evict=False)
        if place is None:
            place, evicted = self._index.take(key, parent, evict=True)
            self._counters.count_evicted(int(evicted))
        return place

    def _grow(self) -> bool:
        """Add a slab if there is room; returns True if there may be free slots now."""
        with self._growing:
            if self._index.has_free():
                return True
            if self._clock.now() < self._full_until_s:
                return False
            self._adopt()
            if self._index.has_free():
                return True
            slab = self._new_slab()
            if slab is None:
                self._full_until_s = self._clock.now() + _RETRY_S
                return False
            self._index.add_slab(slab)
            return True

    def _new_slab(self) -> Slab | None:
        """A new slab; None if there is no room. Then `_full_reason` says why."""
        config, before = self._config, self._full_reason
        self._full_reason = "no_room"
        try:
            return self._directory.create(
                self._geometry,
                capacity_bytes=config.capacity_bytes,
                reserve_bytes=config.reserve_bytes,
            )
        except OSError as error:
            if error.errno not in FULL:
                raise
        self._full_reason = "disk_full"
        if before != "disk_full":
            log.warning(
                "the disk of the storage directory is full; the store stays smaller than its "
                "capacity; free space, or lower reserve_bytes: path=%s used_bytes=%d "
                "capacity_bytes=%d slab_bytes=%d reserve_bytes=%d",
                *(config.path, self.stats().used_bytes, config.capacity_bytes),
                *(self._geometry.total_bytes, config.reserve_bytes),
            )
        return None

    def _remove(self, keys: Sequence[BlockKey]) -> int:
        removed = 0
        for key in keys:
            place = self._index.lease(key)
            if place is None:
                continue
            if place.slab.owned:
                place.slab.table.clear(place.entry.slot)
                removed += self._index.forget(place)
            self._index.release(place)
        return removed

    def _refresh(self) -> None:
        """Take over new slabs without an owner, and learn what other processes have written
        since the last call."""
        with self._refreshing:
            names = self._directory.names()
            if names != self._names:
                self._rescan()
                self._names = names
            for ours in self._theirs.keys() & self._index.names:
                self._index.unlearn(self._theirs.pop(ours))
            for slab in self._theirs.values():
                self._index.learn(slab, slab.table.changed())

    def _rescan(self) -> None:
        self._adopt()
        names = self._directory.names() - self._index.names
        for gone in self._theirs.keys() - names:
            self._index.unlearn(self._theirs.pop(gone))
        for name in names - self._theirs.keys():
            slab = self._directory.peek(name)
            if slab is not None and slab.geometry.form == self._form:
                self._theirs[name] = slab

    def _adopt(self) -> None:
        """Become the owner of slabs that have none."""
        for slab in self._directory.adopt(self._form, known=self._index.names):
            for copy in self._index.add_slab(slab):
                self._drop_copy(copy)
