"""The interface of storage: six methods that every backend implements, and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headwater.clock import Clock, SystemClock
from headwater.storage.codec import BlockFormat
from headwater.types import BlockKey


class BlockRead(Enum):
    """The result for one block of a read."""

    READ = "read"
    """The buffer holds the block, and its header and checksum were verified."""

    ABSENT = "absent"
    """The block is not there, or was evicted meanwhile. The buffer's bytes are undefined."""

    DAMAGED = "damaged"
    """The stored bytes are not this block. The buffer's bytes are undefined."""


class BlockWrite(Enum):
    """The result for one block of a write."""

    WRITTEN = "written"
    PRESENT = "present"
    """The block was there already, or another thread is writing it now; no bytes were moved."""

    REFUSED = "refused"
    """There is no room, or the medium failed; the block cannot be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """Counters of a backend since it was opened, and its current size."""

    backend: str
    num_blocks: int | None
    """Blocks that the backend can find now; None if only its server knows."""

    used_bytes: int | None
    capacity_bytes: int | None
    blocks_read: int
    bytes_read: int
    blocks_written: int
    bytes_written: int
    blocks_absent: int
    """Blocks that were requested but not there."""

    blocks_evicted: int
    reasons: Mapping[str, int]
    """Failures by reason: `bad_checksum`, `disk_full`, `timeout` …"""

    breaker: str = "none"
    """State of the read breaker: `closed`, `open` or `half_open`; `none` without a breaker."""

    write_breaker: str = "none"
    """State of the write breaker."""

    recoveries: int = 0
    """How often a breaker closed again."""

    threads_lost: int = 0
    """Threads that hang in a call that has passed its deadline."""


class StorageBackend(Protocol):
    """Stores blocks of one fixed size by key, in batches. Every method except `stats` may
    block.

    Called from transfer threads only, never from the engine loop. An implementation is
    thread-safe, raises only `StorageError`, and returns only blocks that it has verified
    (`headwater.storage.codec`).

    A call ends within `timeout_s`, or raises `StorageTimeout`. After it has returned or raised,
    it does not touch its buffers any more. The only exception is a `StorageTimeout` whose
    `quiet` is not set yet; then the caller does not reuse the buffers until it is set.
    """

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        """For each run of keys, how many *leading* ones are present. It neither reads blocks
        nor marks them as used. All lookups of one step are one call."""

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        """Fill each buffer directly from the medium, in any order."""

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        """Store each block directly from its buffer; a key that is present is skipped.

        `parents` are the keys before each block. A block can be found only when it is complete.
        """

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        """Remove these blocks; None removes every block of this format that this process may
        remove. Returns the number of removed blocks."""

    def stats(self) -> StorageStats:
        """A snapshot. Never waits for the medium."""

    def close(self) -> None:
        """Release connections, files and threads. Calling it twice is safe; it never raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What every backend gets when it is opened, in addition to its own settings."""

    format: BlockFormat
    clock: Clock = field(default_factory=SystemClock)
    memory: memoryview | None = None
    """The memory of all buffers (the host slab), for backends that register memory."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, for backends whose own tools define some."""


def leading(runs: Sequence[Sequence[BlockKey]], present: Sequence[bool]) -> list[int]:
    """Count the leading present keys of each run.

    `present` has one entry per key, for all runs in order."""
    counts, at = [], 0
    for run in runs:
        found = present[at : at + len(run)]
        counts.append(found.index(False) if False in found else len(run))
        at += len(run)
    return counts
