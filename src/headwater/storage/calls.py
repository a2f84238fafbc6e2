"""What calls of all storage backends share: buffers, deadlines, counts, and checks of the answers.

A plug-in may return anything. A wrong answer is a failure of that one call (StorageError, counted as
`bad_answer`); it never reaches the engine loop.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from headwater.clock import Clock
from headwater.errors import StorageBadAnswer, StorageTimeout
from headwater.storage.base import BlockRead, BlockWrite, StorageStats
from headwater.types import BlockKey


def address_of(view: memoryview) -> int:
    """The address of the first byte of a contiguous buffer. The caller keeps the buffer
    alive."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copy between buffers of equal size without the interpreter lock. A slice assignment would
    block all other threads meanwhile."""
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def advance(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The part of `views` after their first `num_bytes`."""
    index = 0
    while index < len(views) and num_bytes >= len(views[index]):
        num_bytes -= len(views[index])
        index += 1
    rest = views[index:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest


class Deadline:
    """The time until which a caller waits for a storage call."""

    __slots__ = ("_clock", "_end_s", "_what")

    def __init__(self, clock: Clock, timeout_s: float, what: str) -> None:
        self._clock = clock
        self._end_s = clock.now() + timeout_s
        self._what = what

    def left_s(self) -> float:
        """The seconds left, more than 0. Raises StorageTimeout after the deadline."""
        left = self._end_s - self._clock.now()
        if left <= 0:
            raise self.passed()
        return left

    def passed(self) -> StorageTimeout:
        """The timeout error. Raise it only when the call no longer uses its buffers."""
        return StorageTimeout(f"{self._what} did not answer in time")


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
        """Count the outcomes of a read and return them."""
        with self._lock:
            self._reads.update(outcomes)
        return outcomes

    def count_writes(self, outcomes: list[BlockWrite]) -> list[BlockWrite]:
        """Count the outcomes of a write and return them."""
        with self._lock:
            self._writes.update(outcomes)
        return outcomes

    def count_failure(self, reason: str, count: int = 1) -> None:
        """Count a failure with this reason."""
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
        """The counters as a value, with the backend's own sizes."""
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


E = TypeVar("E", bound=Enum)


def check_counts(answer: object, runs: Sequence[Sequence[BlockKey]]) -> list[int]:
    """The answer of `contains`: for each run a number of leading keys."""
    items = _items(answer, len(runs), "contains")
    counts = [check_count(item, "contains") for item in items]
    for count, run in zip(counts, runs, strict=True):
        if count > len(run):
            raise StorageBadAnswer(
                f"storage backend: contains answered {count} for a run of {len(run)} keys"
            )
    return counts


def check_count(answer: object, method: str) -> int:
    """The answer of `method`: a count, which is not negative."""
    try:
        count = operator.index(answer)  # type: ignore[arg-type]  # that is what is checked
    except TypeError:
        count = -1
    if isinstance(answer, bool) or count < 0:
        raise StorageBadAnswer(
            f"storage backend: {method} answered {_shown(answer)}, expected a count"
        )
    return count


def check_outcomes(answer: object, kind: type[E], count: int, method: str) -> list[E]:
    """The answer of `read` or `write`: one `kind` for each block."""
    items = _items(answer, count, method)
    for item in items:
        if not isinstance(item, kind):
            raise StorageBadAnswer(
                f"storage backend: {method} answered {_shown(item)}, expected {kind.__name__}"
            )
    return items


def check_stats(answer: object) -> StorageStats:
    """The answer of `stats`."""
    if not isinstance(answer, StorageStats):
        raise StorageBadAnswer(
            f"storage backend: stats answered {_shown(answer)}, expected StorageStats"
        )
    return answer


def _items(answer: object, count: int, method: str) -> list[Any]:
    if not isinstance(answer, list | tuple) or len(answer) != count:
        raise StorageBadAnswer(
            f"storage backend: {method} answered {_shown(answer)}, expected a list of {count}"
        )
    return list(answer)


def _shown(answer: object) -> str:
    try:
        return f"{type(answer).__name__} {answer!r}"[:80]
    except Exception:  # noqa: BLE001 - the object is a plug-in's, and so is its repr
        return type(answer).__name__
