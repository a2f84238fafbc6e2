"""The bytes below each built-in backend, for tests that damage them."""

from pathlib import Path
from typing import Any

from headwater.clock import SystemClock
from headwater.storage.calls import Deadline
from headwater.storage.codec import HEADER_BYTES
from headwater.storage.file.slab import slab_path
from headwater.storage.file.table import PAGE_BYTES, Entry, Table
from headwater.storage.memory import MemoryStorage
from headwater.storage.redis.resp import Address, RespConnection, command
from headwater.types import BlockKey


class MemoryMedium:
    """The content of a `MemoryStorage`."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage

    def fetch(self, key: BlockKey) -> bytes:
        return bytes(self._storage.values[key])

    def replace(self, key: BlockKey, value: bytes) -> None:
        self._storage.values[key] = bytearray(value)


class FileMedium:
    """The slots of a storage directory. A value that is too short is followed by zeros."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fetch(self, key: BlockKey) -> bytes:
        table, entry = self._find(key)
        with slab_path(table.path).open("rb") as slab:
            slab.seek(entry.slot * table.geometry.slot_bytes)
            header = slab.read(PAGE_BYTES)[:HEADER_BYTES]
            return header + slab.read(table.geometry.form.block_bytes)

    def replace(self, key: BlockKey, value: bytes) -> None:
        table, entry = self._find(key)
        value = value.ljust(HEADER_BYTES + table.geometry.form.block_bytes, b"\0")
        with slab_path(table.path).open("r+b") as slab:
            slab.seek(entry.slot * table.geometry.slot_bytes)
            slab.write(value[:HEADER_BYTES].ljust(PAGE_BYTES, b"\0") + value[HEADER_BYTES:])

    def _find(self, key: BlockKey) -> tuple[Table, Entry]:
        for path in self._path.glob("*.table"):
            table = Table(path, writable=False)
            for entry in table.entries():
                if entry.key == key:
                    return table, entry
        raise KeyError(key)


class RedisMedium:
    """The values of a Redis server."""

    def __init__(self, url: str, key_prefix: str = "headwater:") -> None:
        self._deadline = Deadline(SystemClock(), 600.0, url)
        self._link = RespConnection(Address.parse(url), None, 5.0, self._deadline)
        self._prefix = key_prefix

    def fetch(self, key: BlockKey) -> bytes:
        self._link.send([command(b"GET", self._name(key))], self._deadline)
        value = memoryview(bytearray((self._link.bulk(self._deadline) or 0) + 2))
        self._link.fill([value], self._deadline)
        return bytes(value[:-2])

    def replace(self, key: BlockKey, value: bytes) -> None:
        self._link.send([command(b"SET", self._name(key), value)], self._deadline)
        self._link.reply(self._deadline)

    def close(self) -> None:
        self._link.close()

    def _name(self, key: BlockKey) -> bytes:
        return f"{self._prefix}{key.hex()}".encode()


class MooncakeMedium:
    """The objects of a Mooncake pool, through a store that has joined the pool."""

    def __init__(self, store: Any, key_prefix: str = "headwater:") -> None:  # noqa: ANN401 - untyped
        self._store = store
        self._prefix = key_prefix

    def fetch(self, key: BlockKey) -> bytes:
        value: bytes = self._store.get(self._prefix + key.hex())
        return value

    def replace(self, key: BlockKey, value: bytes) -> None:
        name = self._prefix + key.hex()
        self._store.remove(name, True)
        assert self._store.put(name, value) == 0
