"""The seam of storage: six methods that every backend has, and the values they answer with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headwater.clock import Clock, SystemClock
from headwater.storage.codec import BlockFormat
from headwater.types import BlockKey


class BlockRead(Enum):
    """What became of one block of a read."""

    READ = "read"
    """The buffer holds the block, and the block has proved what it is."""

    ABSENT = "absent"
    """It is not there, or was evicted meanwhile. The buffer's bytes mean nothing."""

    DAMAGED = "damaged"
    """Something is there that is not this block. The buffer's bytes mean nothing."""


class BlockWrite(Enum):
    """What became of one block of a write."""

    WRITTEN = "written"
    PRESENT = "present"
    """It was there already, or another thread is writing it now; no bytes were moved."""

    REFUSED = "refused"
    """There is no room for it, or the medium failed; nothing of it can be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """What a backend has done since it was opened. Counters only grow."""

    backend: str
    num_blocks: int | None
    """Blocks it can find now; None if only the server knows."""

    used_bytes: int | None
    capacity_bytes: int | None
    blocks_read: int
    bytes_read: int
    blocks_written: int
    bytes_written: int
    blocks_absent: int
    """Blocks asked for and not there."""

    blocks_evicted: int
    reasons: Mapping[str, int]
    """Everything that went wrong, counted by reason: `bad_checksum`, `disk_full`, `timeout` …"""

    breaker: str = "none"
    """State of the breaker of reads: `closed`, `open` or `half_open`; `none` without one."""

    write_breaker: str = "none"
    """State of the breaker of writes."""

    recoveries: int = 0
    """How often a breaker closed again."""

    threads_lost: int = 0
    """Threads that hang in a call which has passed its deadline."""


class StorageBackend(Protocol):
    """Keys to blocks of one fixed size. Batch-first; every method but `stats` may block.

    Called from transfer threads only, never from the engine loop. An implementation is
    thread-safe, raises nothing but `StorageError`, and never hands out a block that it cannot
    prove whole (`headwater.storage.codec`).

    A call ends within `timeout_s`, or raises `StorageTimeout`. When it has returned or raised
    it touches its buffers no more; only a `StorageTimeout` whose `quiet` is not set yet may
    still do so, and then the caller keeps those buffers to itself until it is.
    """

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        """Of each run of keys, how many *leading* ones are present. A probe: it neither reads
        nor refreshes. All that one step asks is one call."""

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        """Fill each buffer, straight from the medium, in any order."""

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        """Store each block, straight from its buffer; a key that is present is left alone.

        `parents` are the keys before each block. A block can be found only when it is whole.
        """

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        """Forget these blocks, or with None every block of this format that this process may
        remove; how many there were."""

    def stats(self) -> StorageStats:
        """A snapshot; never blocks on the medium."""

    def close(self) -> None:
        """Release connections, files and threads. Safe to call twice; never raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What every backend is given when it is opened, whatever its own settings are."""

    format: BlockFormat
    clock: Clock = field(default_factory=SystemClock)
    memory: memoryview | None = None
    """Where buffers will come from (the host slab), for backends that register memory."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that a backend's own ecosystem defines."""


def leading(runs: Sequence[Sequence[BlockKey]], present: Sequence[bool]) -> list[int]:
    """Count the leading present keys of each run.

    `present` has one entry per key, for all runs in order."""
    counts, at = [], 0
    for run in runs:
        found = present[at : at + len(run)]
        counts.append(found.index(False) if False in found else len(run))
        at += len(run)
    return counts
