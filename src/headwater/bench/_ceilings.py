"""The speed of a medium without a backend: the simplest calls that move blocks, and a checksum.

Each `Ceiling` moves the same blocks as its backend and reads each of them once more, because a
verifying reader must do so.
"""

import mmap
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from headwater.storage.calls import address_of
from headwater.storage.codec import checksum

_FILE_THREADS = 4
_MOONCAKE_THREADS = 4
_MOONCAKE_BATCH = 16
_ASKED_AHEAD = 4
"""Values that are requested from a Redis server before their answers are read. More of them
would fill its buffers and be slower."""


class Ceiling(Protocol):
    """Moves whole runs of blocks to and from one medium."""

    def write(self, blocks: Sequence[memoryview]) -> None: ...

    def read(self, into: Sequence[memoryview]) -> None: ...

    def forget(self, count: int) -> None:
        """Remove the blocks, as the backend does, so that the next blocks are new to both."""

    def close(self) -> None: ...


class MemoryCeiling:
    """A memcpy to memory whose pages were used before."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._rows = np.ones((num_blocks, block_bytes), dtype=np.uint8)

    def write(self, blocks: Sequence[memoryview]) -> None:
        for row, block in zip(self._rows, blocks, strict=True):
            checksum(block)
            np.copyto(row, np.frombuffer(block, dtype=np.uint8))

    def read(self, into: Sequence[memoryview]) -> None:
        for row, view in zip(self._rows, into, strict=True):
            np.copyto(np.frombuffer(view, dtype=np.uint8), row)
            checksum(view)

    def forget(self, count: int) -> None:
        """Does nothing: the next write overwrites the blocks."""

    def close(self) -> None:
        """Nothing to release."""


class FileCeiling:
    """Direct reads and writes of one file from a few threads; buffered if that is refused."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._path = folder / "ceiling"
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._file = os.open(self._path, flags | os.O_DIRECT)
        except OSError:
            self._file = os.open(self._path, flags)
        os.posix_fallocate(self._file, 0, num_blocks * block_bytes)
        self._threads = ThreadPoolExecutor(_FILE_THREADS)

    def write(self, blocks: Sequence[memoryview]) -> None:
        def put(place: int) -> None:
            checksum(blocks[place])
            os.pwrite(self._file, blocks[place], place * self._block_bytes)

        list(self._threads.map(put, range(len(blocks))))

    def read(self, into: Sequence[memoryview]) -> None:
        def get(place: int) -> None:
            os.preadv(self._file, [into[place]], place * self._block_bytes)
            checksum(into[place])

        list(self._threads.map(get, range(len(into))))

    def forget(self, count: int) -> None:
        """Does nothing: the next write overwrites the blocks, as in the slots of a backend."""

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)
        self._path.unlink()


class RedisCeiling:
    """A plain socket with just enough RESP for values of one size."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, blocks: Sequence[memoryview]) -> None:
        for number, block in enumerate(blocks):
            checksum(block)
            name = b"ceiling%04d" % number
            head = b"*3\r\n$3\r\nSET\r\n$11\r\n%b\r\n$%d\r\n" % (name, len(block))
            self._send([memoryview(head), block, memoryview(b"\r\n")])
        self._fill(memoryview(bytearray(len(blocks) * len(b"+OK\r\n"))))

    def read(self, into: Sequence[memoryview]) -> None:
        asks = [b"*2\r\n$3\r\nGET\r\n$11\r\nceiling%04d\r\n" % n for n in range(len(into))]
        self._socket.sendall(b"".join(asks[:_ASKED_AHEAD]))
        head = memoryview(bytearray(len(b"$%d\r\n" % len(into[0]))))
        tail = memoryview(bytearray(2))
        for place, view in enumerate(into):
            for part in (head, view, tail):
                self._fill(part)
            self._socket.sendall(
                b"".join(asks[place + _ASKED_AHEAD : place + _ASKED_AHEAD + 1])
            )
            checksum(view)

    def forget(self, count: int) -> None:
        asks = [b"*2\r\n$6\r\nUNLINK\r\n$11\r\nceiling%04d\r\n" % n for n in range(count)]
        self._socket.sendall(b"".join(asks))
        self._fill(memoryview(bytearray(count * len(b":1\r\n"))))

    def close(self) -> None:
        self._socket.close()

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def _fill(self, view: memoryview) -> None:
        while view:
            view = view[self._socket.recv_into(view, 0, socket.MSG_WAITALL) :]


class MooncakeCeiling:
    """Batch calls of a store that has joined the pool, on memory it has registered.

    Several batches are in flight, so that one is checked while another moves. One large batch,
    with all checksums before or after it, is up to a quarter slower.
    """

    def __init__(self, store: Any) -> None:  # noqa: ANN401 -- untyped package
        self._store = store
        self._threads = ThreadPoolExecutor(_MOONCAKE_THREADS)

    def write(self, blocks: Sequence[memoryview]) -> None:
        def put(start: int) -> None:
            part = blocks[start : start + _MOONCAKE_BATCH]
            for block in part:
                checksum(block)
            codes = self._store.batch_put_from(*_batch(part, start))
            assert not any(codes), f"mooncake refused: {codes}"

        list(self._threads.map(put, range(0, len(blocks), _MOONCAKE_BATCH)))

    def read(self, into: Sequence[memoryview]) -> None:
        def get(start: int) -> None:
            part = into[start : start + _MOONCAKE_BATCH]
            codes = self._store.batch_get_into(*_batch(part, start))
            assert all(code >= 0 for code in codes), f"mooncake failed: {codes}"
            for view in part:
                checksum(view)

        list(self._threads.map(get, range(0, len(into), _MOONCAKE_BATCH)))

    def forget(self, count: int) -> None:
        self._store.batch_remove([f"ceiling{n}" for n in range(count)], True)

    def close(self) -> None:
        """End the threads; the store belongs to its backend."""
        self._threads.shutdown()


def _batch(views: Sequence[memoryview], start: int) -> tuple[list[str], list[int], list[int]]:
    names = [f"ceiling{start + number}" for number in range(len(views))]
    return names, [address_of(view) for view in views], [len(view) for view in views]


def page_memory(num_bytes: int) -> memoryview:
    """Page-aligned memory whose pages are all allocated."""
    memory = memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    np.frombuffer(memory, dtype=np.uint8)[:] = 1
    return memory
