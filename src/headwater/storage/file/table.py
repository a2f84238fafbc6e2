"""The table of a slab: which block is in which slot, in a small file beside the slab.

    page 0        magic, version, fingerprint, sizes, check · at 2048 a count of changes
    from 4096 on  one entry of 80 bytes per slot: key 32, parent 32, sequence 8, zero 4, check 4

The process that owns a slab holds an exclusive `flock` on the table until it ends, so a slab
whose table can be locked has no owner. An entry is written after the slot is whole and cleared
before the slot is written again; an entry with a wrong check field is an empty slot. The table
is only a hint of what a slot holds: the header in the slot, verified at every read, is the
proof.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.errors import StorageCorrupt
from headwater.storage.codec import BlockFormat
from headwater.types import BlockKey


class OpenFile:
    """A file descriptor that closes with its last reference.

    A read or write in progress keeps its file open, and with it the lock of its owner. Another
    thread that gives up a slab cannot close a descriptor that is in use, and no other process can
    take the slab over while bytes may still be written to it.
    """

    __slots__ = ("fd",)

    def __init__(self, path: Path, flags: int, mode: int = 0o600) -> None:
        self.fd = -1
        self.fd = os.open(path, flags | os.O_CLOEXEC, mode)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


PAGE_BYTES = 4096
_ENTRY_BYTES = 80

_MAGIC = b"HWTABLE\0"
_VERSION = 1
_HEAD = struct.Struct("<8sII32sQQQ")
_CHANGES_AT = 2048
_ENTRY = struct.Struct("<32s32sQI")
_CHECK = struct.Struct("<I")
_EMPTY = bytes(_ENTRY_BYTES)
_ROW = np.dtype(
    [("key", "V32"), ("parent", "V32"), ("sequence", "<u8"), ("zero", "<u4"), ("check", "<u4")]
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The size and number of the blocks in a slab."""

    form: BlockFormat
    num_slots: int

    @property
    def slot_bytes(self) -> int:
        """One page for the header, and the payload padded to whole pages."""
        return PAGE_BYTES + -(-self.form.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def slab_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def table_bytes(self) -> int:
        return PAGE_BYTES + self.num_slots * _ENTRY_BYTES

    @property
    def total_bytes(self) -> int:
        """Disk space of a slab and its table."""
        return self.slab_bytes + self.table_bytes


class Entry(NamedTuple):
    """A complete block in a slot."""

    slot: int
    key: BlockKey
    parent: BlockKey
    sequence: int
    """Order of writing in this directory; higher is newer."""


class Table:
    """An open table file. One thread at a time changes one slot."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        """Open an existing table. Raises StorageCorrupt if it is not one."""
        self.path = path
        self._file = OpenFile(path, os.O_RDWR if writable else os.O_RDONLY)
        self.geometry = _decode_head(os.pread(self._file.fd, _HEAD.size + _CHECK.size, 0))
        self._changes = self._count()
        self._seen: NDArray[np.void] = np.zeros(0, dtype=_ROW)

    @classmethod
    def create(cls, path: Path, geometry: Geometry) -> "Table":
        """A new, owned table. It gets its name only when it is complete."""
        fresh = path.with_suffix(".new")
        try:
            file = OpenFile(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.posix_fallocate(file.fd, 0, geometry.table_bytes)
            os.pwrite(file.fd, _encode_head(geometry), 0)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        table = cls(fresh, writable=True)
        table.own()
        os.rename(fresh, path)
        table.path = path
        return table

    def own(self) -> bool:
        """Become the owner, unless a living process is."""
        return lock_file(self._file)

    def put(self, entry: Entry) -> None:
        """Make the block of a complete slot findable."""
        fields = _ENTRY.pack(entry.key, entry.parent, entry.sequence, 0)
        self._write(entry.slot, fields + _CHECK.pack(zlib.crc32(fields)))
        self._tell()

    def prepare(self, slot: int) -> None:
        """Mark the slot as empty, because it is about to be written. Other processes are not
        notified; what they read there fails verification."""
        self._write(slot, _EMPTY)

    def clear(self, slot: int) -> None:
        """Mark the slot as empty, and notify other processes."""
        self._write(slot, _EMPTY)
        self._tell()

    def entries(self) -> Iterator[Entry]:
        """Every complete block in the table, slot by slot."""
        rows = self._rows()
        for slot in np.flatnonzero(rows["sequence"]):
            entry = _decode_entry(int(slot), rows[slot].tobytes())
            if entry is not None:
                yield entry

    def at(self, slot: int) -> Entry | None:
        """The current entry of one slot."""
        raw = os.pread(self._file.fd, _ENTRY_BYTES, PAGE_BYTES + slot * _ENTRY_BYTES)
        return _decode_entry(slot, raw)

    def changed(self) -> list[tuple[int, Entry | None]]:
        """Slots that another process changed since the last call, with their current
        entries."""
        changes = self._count()
        if changes == self._changes and len(self._seen):
            return []
        rows = self._rows()
        before = self._seen if len(self._seen) else np.zeros(len(rows), dtype=_ROW)
        self._changes, self._seen = changes, rows
        # Each write changes the sequence and the check, so keys need not be compared.
        differs = (rows["sequence"] != before["sequence"]) | (rows["check"] != before["check"])
        slots = np.flatnonzero(differs)
        return [(int(slot), _decode_entry(int(slot), rows[slot].tobytes())) for slot in slots]

    def _count(self) -> int:
        return int.from_bytes(os.pread(self._file.fd, 8, _CHANGES_AT), "little")

    def _write(self, slot: int, raw: bytes) -> None:
        os.pwrite(self._file.fd, raw, PAGE_BYTES + slot * _ENTRY_BYTES)

    def _tell(self) -> None:
        # Lost updates are harmless: two threads that write the same count have still changed
        # it.
        self._changes += 1
        os.pwrite(self._file.fd, self._changes.to_bytes(8, "little"), _CHANGES_AT)

    def _rows(self) -> NDArray[np.void]:
        wanted = self.geometry.num_slots * _ENTRY_BYTES
        raw = os.pread(self._file.fd, wanted, PAGE_BYTES)
        return np.frombuffer(raw.ljust(wanted, b"\0"), dtype=_ROW)


def lock_file(file: OpenFile) -> bool:
    """Lock a table until it is closed; False when a running process holds the lock."""
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _encode_head(geometry: Geometry) -> bytes:
    form = geometry.form
    head = _HEAD.pack(
        _MAGIC,
        _VERSION,
        _ENTRY_BYTES,
        form.fingerprint,
        form.block_bytes,
        geometry.slot_bytes,
        geometry.num_slots,
    )
    return head + _CHECK.pack(zlib.crc32(head))


def _decode_head(raw: bytes) -> Geometry:
    if len(raw) < _HEAD.size + _CHECK.size or raw[:8] != _MAGIC:
        raise StorageCorrupt("the slab table has no head", reason="bad_table")
    head, (check,) = raw[: _HEAD.size], _CHECK.unpack(raw[_HEAD.size :])
    _, version, entry_bytes, fingerprint, block_bytes, slot_bytes, num_slots = _HEAD.unpack(
        head
    )
    if check != zlib.crc32(head) or entry_bytes != _ENTRY_BYTES or version != _VERSION:
        raise StorageCorrupt(
            f"the slab table is damaged, or its version is {version} instead of {_VERSION}",
            reason="bad_table",
        )
    form = BlockFormat(fingerprint=fingerprint, block_bytes=block_bytes)
    geometry = Geometry(form, num_slots)
    if slot_bytes != geometry.slot_bytes:
        raise StorageCorrupt("the slab table has another slot size", reason="bad_table")
    return geometry


def _decode_entry(slot: int, raw: bytes) -> Entry | None:
    if len(raw) < _ENTRY_BYTES or raw == _EMPTY:
        return None
    fields = raw[: _ENTRY.size]
    if _CHECK.unpack(raw[_ENTRY.size :])[0] != zlib.crc32(fields):
        return None
    key, parent, sequence, _ = _ENTRY.unpack(fields)
    return Entry(slot, BlockKey(key), BlockKey(parent), sequence)
