"""Counts of what a backend did, shared by its threads."""

from collections import Counter
from threading import Lock

from headwater.storage.base import BlockRead, BlockWrite, StorageStats


class StorageCounters:
    """Thread-safe counters behind a backend's `stats()`."""

    def __init__(self, backend: str, block_bytes: int) -> None:
        self._backend = backend
        self._block_bytes = block_bytes
        self._lock = Lock()
        self._reads: Counter[BlockRead] = Counter()
        self._writes: Counter[BlockWrite] = Counter()
        self._reasons: Counter[str] = Counter()
        self._evicted = 0

    def count_reads(self, outcomes: list[BlockRead]) -> list[BlockRead]:
        """Count what became of a read, and hand it on."""
        with self._lock:
            self._reads.update(outcomes)
        return outcomes

    def count_writes(self, outcomes: list[BlockWrite]) -> list[BlockWrite]:
        """Count what became of a write, and hand it on."""
        with self._lock:
            self._writes.update(outcomes)
        return outcomes

    def count_failure(self, reason: str, count: int = 1) -> None:
        """Something went wrong, for this reason."""
        with self._lock:
            self._reasons[reason] += count

    def count_evicted(self, count: int = 1) -> None:
        with self._lock:
            self._evicted += count

    def stats(
        self,
        *,
        num_blocks: int | None = None,
        used_bytes: int | None = None,
        capacity_bytes: int | None = None,
        threads_lost: int = 0,
    ) -> StorageStats:
        """The counters as a value, with what the backend knows of its room."""
        with self._lock:
            read, written = self._reads[BlockRead.READ], self._writes[BlockWrite.WRITTEN]
            return StorageStats(
                backend=self._backend,
                num_blocks=num_blocks,
                used_bytes=used_bytes,
                capacity_bytes=capacity_bytes,
                blocks_read=read,
                bytes_read=read * self._block_bytes,
                blocks_written=written,
                bytes_written=written * self._block_bytes,
                blocks_absent=self._reads[BlockRead.ABSENT],
                blocks_evicted=self._evicted,
                reasons=dict(self._reasons),
                threads_lost=threads_lost,
            )
