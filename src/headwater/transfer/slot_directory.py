"""One record for each host slot, in memory that outlives the engine.

The directory is correct whenever the engine dies, because writes have a fixed order:

    before a copy into a slot begins      its record is made empty
    after the copy has ended              the record is written, its `is_whole` last

So a complete record describes complete bytes. When a process is killed, the stores of one
thread to shared memory stay in their order. The key of a record proves its tokens and
everything before them: a record is adopted only if its key is the hash of its parent and
tokens. The bytes of blocks have no checksum, because a GPU delivers them faster than a CPU can
read them.
"""

import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.cache import HostArrival, HostChange, HostCleared, KeyScheme, Namespace
from headwater.types import BlockKey, Slots

_MAGIC = b"headwater-slots1"
_HEADER_BYTES = 4096
_MAX_SALT_BYTES = 256
"""Blocks of tenants with a longer salt are not recorded."""

_HEADER = np.dtype(
    [("magic", "S16"), ("identity", "V32"), ("num_slots", "<i8"), ("block_bytes", "<i8")]
)


class SlotRecord(NamedTuple):
    """One complete record."""

    slot: int
    key: BlockKey
    parent: BlockKey
    tokens: bytes
    salt: str
    written_s: float


class DirectoryShape(NamedTuple):
    """What must be equal in two engines so that one can adopt the blocks of the other."""

    identity: bytes
    """The root key of the shared namespace, from which all its keys are chained: model, format,
    block size."""

    num_slots: int
    block_bytes: int


class SlotDirectory:
    """The records of one host tier. Used by the engine loop's thread only."""

    def __init__(self, file: int, shape: DirectoryShape, block_tokens: int) -> None:
        """Open the directory in `file`. If it has another shape, it is emptied."""
        self._record = _record_type(block_tokens)
        num_bytes = _HEADER_BYTES + shape.num_slots * self._record.itemsize
        is_known = read_shape(file) == shape and os.fstat(file).st_size == num_bytes
        if not is_known:
            os.ftruncate(file, 0)
            os.ftruncate(file, num_bytes)
        self._map = mmap.mmap(file, num_bytes)
        self._records: NDArray[Any] = np.frombuffer(
            self._map, dtype=self._record, count=shape.num_slots, offset=_HEADER_BYTES
        )
        self._header: NDArray[Any] = np.frombuffer(self._map, dtype=_HEADER, count=1)
        if not is_known:
            self._write_header(shape)
        self._shape = shape

    def invalidate(self, slots: Slots) -> None:
        """Empty the records of `slots`, because their bytes are about to change."""
        self._records["is_whole"][slots] = 0

    def apply(self, changes: Iterable[HostChange], scheme: KeyScheme, *, now: float) -> None:
        """Write records of blocks that arrived; `scheme` computes their keys."""
        for change in changes:
            if isinstance(change, HostCleared):
                self._clear(scheme.root(Namespace()))
            else:
                self._write(change, now)

    def records(self) -> Iterator[SlotRecord]:
        """All complete records."""
        for slot in np.flatnonzero(self._records["is_whole"] == 1).tolist():
            record = self._records[slot]
            salt = record["salt"].tobytes()[: int(record["salt_bytes"])]
            yield SlotRecord(
                slot=slot,
                key=BlockKey(record["key"].tobytes()),
                parent=BlockKey(record["parent"].tobytes()),
                tokens=record["tokens"].tobytes(),
                salt=salt.decode(errors="replace"),
                written_s=float(record["written_s"]),
            )

    def _write(self, change: HostArrival, now: float) -> None:
        slots, salt = change.slots, change.namespace.salt.encode()
        if len(salt) > _MAX_SALT_BYTES or change.namespace.adapter:
            return
        count = len(slots)
        new = np.zeros(count, dtype=self._record)
        keys = b"".join(change.keys)
        new["key"] = np.frombuffer(keys, dtype="V32")
        # The parent of a block is the key before it, so the parents are the keys moved by one
        # place.
        new["parent"] = np.frombuffer((change.parent + keys)[: 32 * count], dtype="V32")
        new["tokens"] = np.frombuffer(change.tokens, dtype="<i4").reshape(count, -1)
        new["salt"] = np.frombuffer(salt.ljust(_MAX_SALT_BYTES, b"\0"), dtype=np.uint8)
        new["salt_bytes"] = len(salt)
        new["written_s"] = now
        # `is_whole` of `new` is 0, so a record that is cut off by a kill counts as empty.
        self._records[slots] = new
        self._records["is_whole"][slots] = 1

    def _clear(self, identity: bytes) -> None:
        self._records["is_whole"] = 0
        self._shape = self._shape._replace(identity=identity)
        self._write_header(self._shape)

    def _write_header(self, shape: DirectoryShape) -> None:
        header = self._header[0]
        # The magic number is written last. After a kill between these stores it is missing, and
        # the next engine empties the directory.
        header["magic"] = b""
        header["identity"] = np.frombuffer(shape.identity, dtype="V32")[0]
        header["num_slots"], header["block_bytes"] = shape.num_slots, shape.block_bytes
        header["magic"] = _MAGIC


def read_shape(file: int) -> DirectoryShape | None:
    """The shape of the directory in `file`; None if there is no directory."""
    raw = os.pread(file, _HEADER.itemsize, 0)
    if len(raw) < _HEADER.itemsize:
        return None
    header = np.frombuffer(raw, dtype=_HEADER)[0]
    if header["magic"] != _MAGIC:
        return None
    return DirectoryShape(
        identity=header["identity"].tobytes(),
        num_slots=int(header["num_slots"]),
        block_bytes=int(header["block_bytes"]),
    )


def _record_type(block_tokens: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("is_whole", "u1"),
            ("salt_bytes", "<u2"),
            ("written_s", "<f8"),
            ("key", "V32"),
            ("parent", "V32"),
            ("salt", "u1", (_MAX_SALT_BYTES,)),
            ("tokens", "<i4", (block_tokens,)),
        ]
    )
