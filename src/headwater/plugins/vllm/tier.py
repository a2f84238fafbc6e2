"""A secondary tier for vLLM's `TieringOffloadingSpec`: any Headwater storage below its CPU tier.

    "secondary_tiers": [{"type": "HeadwaterTier", "module_path": "headwater.plugins.vllm.tier",
                         "backend": "file", "config": {"path": "/var/lib/kv"}}]

All methods run on vLLM's scheduler thread and return at once. Reads go through staging memory, so
a call that never returns costs a miss. A write reads vLLM's memory in place; until it has ended,
vLLM keeps the chunks of its job.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from headwater.cache import JobOutcome, JobStatus
from headwater.clock import Clock, SystemClock
from headwater.errors import StorageTimeout
from headwater.plugins.identity import storage_keys
from headwater.plugins.key_lookups import KeyLookups
from headwater.plugins.settings import WRITE_BLOCKS, PluginConfig
from headwater.plugins.staging import StagedStorage
from headwater.plugins.storage_jobs import StorageJobs
from headwater.plugins.versions import require_tested
from headwater.plugins.vllm.identity import HASH_BYTES, identify_offload
from headwater.plugins.vllm.paths import GROUP_BYTES, group_paths, positions
from headwater.plugins.vllm.primary import PrimaryMemory
from headwater.plugins.vllm.tier_metrics import TierMetrics, metric_definitions
from headwater.plugins.write_order import PrefixUses, WriteOrder, WriteRank
from headwater.types import BlockKey, JobId

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

_NUM_READS = 8
"""Reads that may run or hang at the same time; each has staging memory for one slice."""

_NUM_WRITES = 4
_DRAIN_S = 120.0


@dataclass(slots=True)
class _Transfer:
    """One job of vLLM, divided into slices."""

    job: TransferJob
    keys: list[OffloadKey]
    slices: dict[JobId, tuple[int, int]] = field(default_factory=dict)
    """Slices in flight: their range of `keys`."""

    num_waiting: int = 0
    """Slices that wait to be written."""

    good: set[int] = field(default_factory=set)
    """Indices of blocks that were read or written."""

    began_s: float = 0.0
    failed: bool = False


class HeadwaterTier(SecondaryTierManager):
    """Blocks in a Headwater storage backend: bounded, checksummed, with breakers and
    deadlines."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,  # noqa: ANN401 - vLLM's OffloadingSpec
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,  # noqa: ANN401 - vLLM's BackpressureDetector
        clock: Clock | None = None,
        **settings: Any,  # noqa: ANN401 - JSON
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = PluginConfig.read(settings, "HeadwaterTier", unused=["adapters"])
        version = require_tested("vllm", allow_untested=config.allow_untested)
        self._clock = clock or SystemClock()
        self._identity = identify_offload(offloading_spec.config, config, version).fingerprint()
        self._memory = PrimaryMemory(primary_kv_view)
        guarded = config.open(
            self._identity, self._memory.block_bytes, self._memory.memory, self._clock
        )
        staged = StagedStorage(
            guarded, self._memory.block_bytes, slice_blocks=WRITE_BLOCKS, num_slices=_NUM_READS
        )
        self._storage = StorageJobs(
            staged,
            self._memory,
            config.timeouts(),
            self._clock,
            root=BlockKey(self._identity),
            num_threads=_NUM_WRITES,
        )
        self._lookups = KeyLookups()
        self._uses = PrefixUses()
        self._writes: WriteOrder[tuple[_Transfer, int, int]] = WriteOrder(
            min(config.max_waiting_writes, _most_waiting(self._memory.num_slots))
        )
        self._running: dict[JobId, _Transfer] = {}
        self._lost: set[JobId] = set()
        """Running calls that have passed their deadline."""
        self._num_writes = 0
        self._finished: list[JobResult] = []
        self._metrics = TierMetrics()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not _is_safe(key):
            return LookupResult.MISS
        [name] = storage_keys(self._identity, [key])
        present = self._lookups.ask(key, req_context.req_id, name)
        if present is None:
            return LookupResult.RETRY
        return LookupResult.HIT if present else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        transfer = self._begin(job_metadata)
        if not all(_is_safe(key) for key in transfer.keys):
            transfer.failed = True
        else:
            slices = _slices(len(transfer.keys))
            transfer.num_waiting = len(slices)
            for (start, end), rank in zip(slices, self._ranks(transfer, slices), strict=True):
                self._wait(transfer, start, end, rank)
                self._start_writes()  # so that a slice that can start does not count as waiting
        self._settle(transfer)

    def submit_load(self, job_metadata: TransferJob) -> None:
        transfer = self._begin(job_metadata)
        names = storage_keys(self._identity, transfer.keys)
        chunks = [int(chunk) for chunk in job_metadata.chunk_ids]
        for start, end in _slices(len(names)):
            number = self._storage.read(names[start:end], chunks[start:end])
            transfer.slices[number] = start, end
            self._running[number] = transfer
        self._settle(transfer)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._take_outcomes()
        self._start_writes()
        finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        """Whether vLLM has to make steps. Calls that have passed their deadline do not count: they
        may never return."""
        can_write = len(self._writes) and self._num_writes < _NUM_WRITES
        return bool(can_write or self._finished or len(self._running) > len(self._lost))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing to do: uses count when their request finishes."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        for path in group_paths(req_context).values():
            self._uses.record(path)
        self._lookups.forget(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._take_outcomes()
        batch = self._lookups.take_batch()
        if batch:
            # Each key is its own run: with a sliding window only the last blocks are needed.
            job = self._storage.lookup([[name] for name in batch.values()])
            self._lookups.start(job, batch)
        self._start_writes()

    def drain_jobs(self) -> None:
        """Drop the waiting writes, then wait for the calls in flight."""
        for transfer, _, _ in self._writes.clear():
            transfer.num_waiting -= 1
            transfer.failed = True
            self._settle(transfer)
        deadline = self._clock.now() + _DRAIN_S
        while self._running:
            left = deadline - self._clock.now()
            if left <= 0:
                raise StorageTimeout(
                    f"storage calls did not end within {_DRAIN_S:g} s; vLLM's host memory "
                    "cannot be reused while they run, so restart the server"
                )
            self._storage.wait(left)
            self._take_outcomes()

    def shutdown(self) -> None:
        """Stop without waiting for hanging storage calls."""
        self._storage.close()
        self._memory.release()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    def get_stats(self) -> "OffloadingConnectorStats | None":
        return self._metrics.take(
            self._storage.stats(), self._storage.links, self._memory.block_bytes, self._writes
        )

    def _begin(self, job: TransferJob) -> _Transfer:
        return _Transfer(job, list(job.keys), began_s=self._clock.now())

    def _ranks(self, transfer: _Transfer, slices: list[tuple[int, int]]) -> list[WriteRank]:
        """The places of the job's slices in the order of writes."""
        keys, context = transfer.keys, transfer.job.req_context
        ends = {} if context is None else positions(context)
        ranks = self._uses.rank(keys, slices)
        return [
            WriteRank(level, uses, ends.get(keys[-1], len(keys)), ends.get(keys[start], start))
            for (level, uses), (start, _) in zip(ranks, slices, strict=True)
        ]

    def _wait(self, transfer: _Transfer, start: int, end: int, rank: WriteRank) -> None:
        dropped = self._writes.add((transfer, start, end), count=end - start, rank=rank)
        for other, _, _ in dropped:
            other.num_waiting -= 1
            other.failed = True
            if other is not transfer:
                self._settle(other)

    def _start_writes(self) -> None:
        while self._num_writes < _NUM_WRITES:
            waiting = self._writes.pop()
            if waiting is None:
                return
            transfer, start, end = waiting
            transfer.num_waiting -= 1
            names = storage_keys(self._identity, transfer.keys[start:end])
            chunks = [int(chunk) for chunk in transfer.job.chunk_ids[start:end]]
            number = self._storage.write(names, chunks)
            transfer.slices[number] = start, end
            self._running[number] = transfer
            self._num_writes += 1

    def _take_outcomes(self) -> None:
        for outcome in self._storage.take():
            if not self._lookups.finish(outcome.job, outcome.found):
                self._finish_slice(outcome)

    def _finish_slice(self, outcome: JobOutcome) -> None:
        transfer = self._running.get(outcome.job)
        if transfer is None:
            return
        if outcome.status is JobStatus.TIMED_OUT:
            transfer.failed = True
            self._lost.add(outcome.job)
            return  # its memory may still be read; QUIET follows
        del self._running[outcome.job]
        self._lost.discard(outcome.job)
        self._num_writes -= not transfer.job.is_promotion
        start, end = transfer.slices.pop(outcome.job)
        good = end - start if outcome.status is JobStatus.DONE else outcome.num_blocks
        transfer.good.update(range(start, start + good))
        self._settle(transfer)

    def _settle(self, transfer: _Transfer) -> None:
        """Report a job when none of its slices waits or runs."""
        if transfer.slices or transfer.num_waiting:
            return
        keys, good = transfer.keys, transfer.good
        success = len(good) == len(keys) and not transfer.failed
        loaded = transfer.job.is_promotion
        if loaded and not success:
            self._lookups.mark_absent(key for i, key in enumerate(keys) if i not in good)
        self._finished.append(
            JobResult(
                job_id=transfer.job.job_id,
                success=success,
                successful_keys=[keys[i] for i in sorted(good)] if loaded and good else None,
                transfer_time=self._clock.now() - transfer.began_s,
                transfer_bytes=len(good) * self._memory.block_bytes,
            )
        )


def _is_safe(key: OffloadKey) -> bool:
    """Whether the key is a collision-resistant hash; see `HASH_BYTES`."""
    return len(key) == HASH_BYTES + GROUP_BYTES


def _most_waiting(num_chunks: int) -> int:
    """Maximum number of chunks that wait to be written. vLLM cannot evict them from its CPU
    tier, so with more of them slow storage would leave no room there for new chunks."""
    return max(num_chunks // 2, WRITE_BLOCKS)


def _slices(count: int) -> list[tuple[int, int]]:
    return [(at, min(at + WRITE_BLOCKS, count)) for at in range(0, count, WRITE_BLOCKS)]
