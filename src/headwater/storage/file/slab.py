"""A slab: one file of equal slots, each a header page and a payload, read and written whole.

    slot 0                        slot 1
    |header|   payload  |padding| |header|   payload  |padding|  …
    0     4096                    slot_bytes

It uses direct I/O if the file system supports it. The payload is transferred directly between
the caller's buffer and the disk if both consist of whole pages, otherwise through a staging
buffer.
"""

import errno
import mmap
import os
from pathlib import Path
from threading import local

from headwater.errors import StorageCorrupt
from headwater.storage.calls import address_of, copy_bytes
from headwater.storage.codec import encode_header, verify_block
from headwater.storage.file.table import PAGE_BYTES, Entry, Geometry, OpenFile, Table


class Slab:
    """An open slab and its table. Threads may read and write different slots at once."""

    def __init__(self, table: Table, *, owned: bool, direct: bool) -> None:
        """Open the slab beside `table`. Raises StorageCorrupt if it is missing or too short."""
        self.table = table
        self.owned = owned
        self.geometry = table.geometry
        self.path = slab_path(table.path)
        self._staging = local()
        flags = os.O_RDWR if owned else os.O_RDONLY
        try:
            self._file, self.direct = _open(self.path, flags, direct)
        except FileNotFoundError as error:
            raise StorageCorrupt(f"{self.path.name} is missing", reason="bad_slab") from error
        if os.fstat(self._file.fd).st_size < self.geometry.slab_bytes:
            raise StorageCorrupt(f"{self.path.name} is truncated", reason="bad_slab")

    @staticmethod
    def create(table_path: Path, geometry: Geometry, *, direct: bool) -> "Slab":
        """A new slab, completely allocated on the disk. Raises OSError if there is too little
        room."""
        path = slab_path(table_path)
        try:
            file = OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.posix_fallocate(file.fd, 0, geometry.slab_bytes)
            table = Table.create(table_path, geometry)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return Slab(table, owned=True, direct=direct)

    def read(self, entry: Entry, into: memoryview) -> None:
        """Fill `into` with a block and verify it. Raises StorageCorrupt if it is not
        complete."""
        page, payload, staged = self._buffers(into)
        got = os.preadv(self._file.fd, [page, payload], entry.slot * self.geometry.slot_bytes)
        if got < PAGE_BYTES + len(into):
            raise StorageCorrupt("a slot was cut short", reason="truncated")
        if staged:
            copy_bytes(into, payload[: len(into)])
        verify_block(page, into, form=self.geometry.form, key=entry.key)

    def write(self, entry: Entry, block: memoryview) -> None:
        """Write a whole slot and make it findable. Raises OSError if that fails; then nothing
        is findable."""
        self.table.prepare(entry.slot)
        page, payload, staged = self._buffers(block)
        header = encode_header(self.geometry.form, entry.key, entry.parent, block)
        page[: len(header)] = header
        if staged:
            copy_bytes(payload[: len(block)], block)
        put = os.pwritev(self._file.fd, [page, payload], entry.slot * self.geometry.slot_bytes)
        if put < PAGE_BYTES + len(payload):
            raise OSError(errno.ENOSPC, "only part of a slot was written")
        self.table.put(entry)

    def _buffers(self, block: memoryview) -> tuple[memoryview, memoryview, bool]:
        """The header page of this thread, the buffer for the payload, and whether that is a
        staging buffer."""
        staging: memoryview | None = getattr(self._staging, "view", None)
        if staging is None:
            staging = memoryview(mmap.mmap(-1, self.geometry.slot_bytes))
            self._staging.view = staging
        page = staging[:PAGE_BYTES]
        if not self.direct or _whole_pages(block):
            return page, block, False
        return page, staging[PAGE_BYTES:], True


def slab_path(table_path: Path) -> Path:
    return table_path.with_suffix(".slab")


def _whole_pages(block: memoryview) -> bool:
    return len(block) % PAGE_BYTES == 0 and address_of(block) % PAGE_BYTES == 0


def _open(path: Path, flags: int, direct: bool) -> tuple[OpenFile, bool]:
    if direct:
        try:
            file = OpenFile(path, flags | os.O_DIRECT)
            if _direct_works(file):
                return file, True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return OpenFile(path, flags), False


def _direct_works(file: OpenFile) -> bool:
    """Whether direct reads work: some file systems accept the flag but then refuse reads."""
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            os.preadv(file.fd, [page], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True
