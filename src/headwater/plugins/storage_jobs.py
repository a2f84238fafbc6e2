"""Storage jobs for the scheduler thread of another engine, which must never wait.

They use the same threads, deadlines and breakers as Headwater's own engine
(`headwater.transfer`). Keys come from the other engine, so a lookup contains them instead of
computing them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.cache import JobOutcome, LoadJob, Lookup, OffloadJob
from headwater.cache.keys import KeyScheme
from headwater.clock import Clock
from headwater.storage import StorageStats
from headwater.storage.base import StorageBackend
from headwater.transfer.mover import LinkTotals, Mover, TransferConfig
from headwater.transfer.slab import HostSlab
from headwater.transfer.workers import StorageWorkers
from headwater.types import EMPTY, BlockKey, JobId, Tier

_SCHEME = KeyScheme(block_tokens=1)
"""Unused: the keys of these lookups are known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyLookup(Lookup):
    """Ask storage for keys that another engine has computed, run by run."""

    keys: Sequence[Sequence[BlockKey]]

    @property
    def num_blocks(self) -> int:
        return sum(len(run) for run in self.keys)

    def runs(self) -> list[list[BlockKey]]:
        return [list(run) for run in self.keys]


class StorageJobs:
    """Starts lookups, reads and writes without waiting, and reports the outcome of each once.

    After TIMED_OUT a read or write has a second outcome, QUIET: until then its slots may still
    be touched. Used by one thread.
    """

    def __init__(
        self,
        backend: StorageBackend,
        slab: HostSlab,
        timeouts: TransferConfig,
        clock: Clock,
        *,
        root: BlockKey,
        num_threads: int = 2,
    ) -> None:
        """`root` is the key before the first block of every write; `num_threads` for each kind
        of call."""
        self._clock = clock
        self._root = root
        workers = StorageWorkers(backend, slab, clock, num_threads=num_threads)
        self._mover = Mover(None, workers, timeouts, block_bytes=slab.block_bytes)
        self._last = 0

    @property
    def num_in_flight(self) -> int:
        """Jobs whose call may still run."""
        return self._mover.num_in_flight

    @property
    def links(self) -> dict[str, LinkTotals]:
        """Totals of each link, for reading."""
        return self._mover.links

    def lookup(self, runs: Sequence[Sequence[BlockKey]]) -> JobId:
        """Ask how many leading keys of each run storage has; the outcome has `found`."""
        job = self._next()
        plan = KeyLookup(job=job, questions=(), scheme=_SCHEME, keys=runs)
        self._mover.start([plan], now=self._clock.now())
        return job

    def read(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> JobId:
        """Read blocks into slots of the slab."""
        job = self._next()
        plan = LoadJob(
            job=job,
            source=Tier.STORAGE,
            target=Tier.HOST,
            source_slots=EMPTY,
            target_slots=np.array(slots, dtype=np.int64),
            keys=tuple(keys),
        )
        self._mover.start([plan], now=self._clock.now())
        return job

    def write(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> JobId:
        """Write blocks from slots of the slab; keys that storage has already are skipped."""
        job = self._next()
        plan = OffloadJob(
            job=job,
            source=Tier.HOST,
            target=Tier.STORAGE,
            source_slots=np.array(slots, dtype=np.int64),
            target_slots=EMPTY,
            keys=tuple(keys),
            parent=self._root,
        )
        self._mover.start([plan], now=self._clock.now())
        return job

    def take(self) -> list[JobOutcome]:
        """The outcomes since the last call, including passed deadlines. Never waits."""
        return self._mover.take(now=self._clock.now())

    def wait(self, timeout_s: float) -> None:
        """Sleep until a job has ended or a deadline has passed, at most `timeout_s`."""
        wake_s = self._mover.wake_s
        if wake_s is not None:
            timeout_s = min(timeout_s, max(wake_s - self._clock.now(), 0.0))
        self._mover.completions.wait(timeout_s)

    def stats(self) -> StorageStats:
        """Statistics of the storage backend. Never blocks."""
        stats = self._mover.storage_stats()
        assert stats is not None, "there is always storage here"
        return stats

    def close(self) -> None:
        """End without waiting for running calls. Calling it twice is safe."""
        self._mover.close()

    def _next(self) -> JobId:
        self._last += 1
        return JobId(self._last)
