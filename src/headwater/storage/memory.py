"""Blocks in the memory of this process: the reference implementation, and a fake for tests."""

import mmap
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self

from headwater.errors import ConfigError, StorageCorrupt
from headwater.storage.base import BlockRead, BlockWrite, Opening, StorageStats, leading
from headwater.storage.calls import StorageCounters, copy_bytes
from headwater.storage.codec import (
    HEADER_BYTES,
    BlockFormat,
    encode_header,
    verify_block,
)
from headwater.storage.settings import read_settings
from headwater.types import BlockKey

Value = bytearray | memoryview
"""Header and payload of a block."""

_LARGE_BYTES = 64 << 10
_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Settings of the `memory` backend."""

    capacity_bytes: int = 1 << 30
    """Maximum number of bytes of payload kept; the least recently used block is dropped
    first."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1:
            raise ConfigError(f"capacity_bytes must be positive, got {self.capacity_bytes}")


class MemoryStorage:
    """A dictionary of blocks. Each is kept as the bytes that another medium would store."""

    def __init__(self, config: MemoryConfig, form: BlockFormat) -> None:
        self._form = form
        self._max_blocks = config.capacity_bytes // form.block_bytes
        self._lock = Lock()
        self.values: OrderedDict[BlockKey, Value] = OrderedDict()
        """Header and payload of each block, least recently used first. Tests damage these."""
        # Reused memory is filled four times as fast as new memory.
        self._spare: list[Value] = []
        self._counters = StorageCounters("memory", form.block_bytes)

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        return cls(read_settings(MemoryConfig, settings, "memory"), opening.format)

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        with self._lock:
            return leading(runs, [key in self.values for run in runs for key in run])

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        self._form.check(into)
        outcomes = [self._read(key, into) for key, into in zip(keys, into, strict=True)]
        self._touch(keys)
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
        outcomes = [self._write(*one) for one in zip(keys, blocks, parents, strict=True)]
        self._touch(keys)
        return self._counters.count_writes(outcomes)

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        with self._lock:
            wanted = list(self.values) if keys is None else keys
            present = [key for key in wanted if key in self.values]
            for key in present:
                self._forget(key)
            return len(present)

    def stats(self) -> StorageStats:
        with self._lock:
            num_blocks = len(self.values)
        return self._counters.stats(
            num_blocks=num_blocks,
            used_bytes=num_blocks * self._form.block_bytes,
            capacity_bytes=self._max_blocks * self._form.block_bytes,
        )

    def close(self) -> None:
        with self._lock:
            self.values.clear()
            self._spare.clear()

    def _read(self, key: BlockKey, into: memoryview) -> BlockRead:
        with self._lock:  # a buffer is reused only while the lock is held
            value = self.values.get(key)
            if value is None:
                return BlockRead.ABSENT
            header = bytes(value[:HEADER_BYTES])
            whole = len(value) == HEADER_BYTES + len(into)
            if whole:
                copy_bytes(into, memoryview(value)[HEADER_BYTES:])
        try:
            if not whole:
                raise StorageCorrupt("a block was cut short", reason="truncated")
            verify_block(header, into, form=self._form, key=key)
        except StorageCorrupt as error:
            self._counters.count_failure(error.reason)
            with self._lock:
                self.values.pop(key, None)
            return BlockRead.DAMAGED
        return BlockRead.READ

    def _write(self, key: BlockKey, block: memoryview, parent: BlockKey) -> BlockWrite:
        with self._lock:
            if key in self.values:
                return BlockWrite.PRESENT
        if not self._max_blocks:
            self._counters.count_failure("no_room")
            return BlockWrite.REFUSED
        header = encode_header(self._form, key, parent, block)
        with self._lock:
            if key in self.values:
                return BlockWrite.PRESENT
            if len(self.values) == self._max_blocks:
                self._forget(next(iter(self.values)))
                self._counters.count_evicted()
            if not self._spare:
                self._spare = self._make_values()
            value = self._spare.pop()
            value[:HEADER_BYTES] = header
            copy_bytes(memoryview(value)[HEADER_BYTES:], block)
            self.values[key] = value
        return BlockWrite.WRITTEN

    def _make_values(self) -> list[Value]:
        """Memory for more blocks. Large blocks use huge pages, each payload at the start of a
        page: writing to them is a quarter faster than to memory of malloc."""
        block_bytes = self._form.block_bytes
        if block_bytes < _LARGE_BYTES:
            return [bytearray(HEADER_BYTES + block_bytes)]
        stride = mmap.PAGESIZE * (1 - -block_bytes // mmap.PAGESIZE)
        count = min(max(_CHUNK_BYTES // stride, 1), self._max_blocks)
        chunk = mmap.mmap(-1, count * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            chunk.madvise(mmap.MADV_HUGEPAGE)
        payloads = range(mmap.PAGESIZE, count * stride, stride)
        return [memoryview(chunk)[at - HEADER_BYTES : at + block_bytes] for at in payloads]

    def _forget(self, key: BlockKey) -> None:
        value = self.values.pop(key)
        if len(value) == HEADER_BYTES + self._form.block_bytes:
            self._spare.append(value)

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        # Last block first, so that the head of a run is evicted after its tail.
        with self._lock:
            for key in reversed(keys):
                if key in self.values:
                    self.values.move_to_end(key)
