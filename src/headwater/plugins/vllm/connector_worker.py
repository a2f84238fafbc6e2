"""The worker's side of the connector: copies blocks and calls storage, as the scheduler's side
orders.

All methods run on vLLM's worker thread. It copies between KV cache and host slots itself. Storage
calls run in other threads, and their ends are handled at the next step; a step that computes
something never waits for them. A block is copied to the KV cache only after its checksum was
verified.
"""

from typing import NamedTuple

import numpy as np

from headwater.cache import JobOutcome, JobStatus
from headwater.clock import Clock
from headwater.plugins.identity import storage_keys
from headwater.plugins.settings import PluginConfig
from headwater.plugins.storage_jobs import StorageJobs
from headwater.plugins.vllm.messages import LoadOrder, OrderEnd, RankReport, StepOrders
from headwater.plugins.vllm.pages import KVPages
from headwater.transfer.slab import PAGE_BYTES, HostSlab
from headwater.types import BlockKey, JobId

_EMPTY_STEP_S = 0.002
"""Longest wait for storage in a step that computes nothing. vLLM repeats such steps as fast as it can,
and hundreds of them would keep the interpreter lock from the thread whose answer they need."""


class LoadArrivals(NamedTuple):
    """Results of loads since the last step."""

    requests: set[str]
    """Requests whose loads have ended, successfully or not."""

    failed_blocks: set[int]
    """KV blocks that were not filled; vLLM computes them."""


class ConnectorWorker:
    """Host memory and storage of one rank."""

    def __init__(
        self,
        pages: KVPages,
        num_slots: int,
        identity: bytes,
        config: PluginConfig | None,
        clock: Clock,
    ) -> None:
        """`config` is None without storage."""
        self._pages = pages
        self._identity = identity
        self.slab = HostSlab(num_slots, pages.block_bytes)
        # This write allocates every page now. Copies after a step that had to allocate pages
        # were ten times as slow.
        np.frombuffer(self.slab.memory, dtype=np.uint8)[::PAGE_BYTES] = 0
        pages.bind(self.slab)
        self.storage: StorageJobs | None = None
        if config is not None:
            backend = config.open(identity, pages.block_bytes, self.slab.memory, clock)
            root = BlockKey(identity)
            self.storage = StorageJobs(backend, self.slab, config.timeouts(), clock, root=root)
        self._lookups: dict[JobId, int] = {}
        """Numbers of orders in flight, by job."""
        self._stores: dict[JobId, int] = {}
        self._reads: dict[JobId, LoadOrder] = {}
        self._lost: dict[JobId, int] = {}
        """Read orders that took too long; their slots may still be touched."""
        self._report = RankReport()
        self._changed = False
        self._arrived: set[str] = set()
        self._failed: set[int] = set()

    def start(self, orders: StepOrders) -> None:
        """Start the loads, lookups and writes of a step, before its forward pass."""
        for load in orders.loads:
            self._start_load(load)
        if self.storage is None:
            return
        for lookup in orders.lookups:
            keys = storage_keys(self._identity, lookup.hashes)
            self._lookups[self.storage.lookup([keys])] = lookup.number
        for store in orders.stores:
            keys = storage_keys(self._identity, store.hashes)
            self._stores[self.storage.write(keys, store.slots)] = store.number
        if not orders.computes and self.storage.num_in_flight:
            self.storage.wait(_EMPTY_STEP_S)

    def save(self, orders: StepOrders) -> None:
        """Copy the blocks that this step has completed."""
        for order in orders.saves:
            self._pages.save(order.block_ids, order.slots)
            self._end(order.number, len(order.slots))

    def take_arrivals(self) -> LoadArrivals:
        """Loads that ended since the last call."""
        if self.storage is not None:
            for outcome in self.storage.take():
                self._changed = True
                self._finish(outcome)
        arrivals = LoadArrivals(self._arrived, self._failed)
        self._arrived, self._failed = set(), set()
        return arrivals

    def take_report(self) -> RankReport | None:
        """Orders that ended since the last call, for the scheduler's side."""
        report, self._report = self._report, RankReport()
        return report if report.ended else None

    def take_changed(self) -> bool:
        """Whether a storage job has ended since the last call, so that stats are new."""
        changed, self._changed = self._changed, False
        return changed

    def close(self) -> None:
        """End without waiting for running storage calls."""
        if self.storage is not None:
            self.storage.close()

    def _start_load(self, load: LoadOrder) -> None:
        if load.num_host:
            self._pages.load(load.slots[: load.num_host], load.block_ids[: load.num_host])
        if not load.hashes or self.storage is None:
            self._fill_blocks(load, 0)
            return
        keys = storage_keys(self._identity, load.hashes)
        self._reads[self.storage.read(keys, load.slots[load.num_host :])] = load

    def _finish(self, outcome: JobOutcome) -> None:
        if outcome.job in self._reads:
            self._finish_read(self._reads.pop(outcome.job), outcome)
        elif outcome.job in self._lost:
            self._end(self._lost.pop(outcome.job), 0)
        elif outcome.job in self._lookups:
            found = outcome.found[0] if outcome.found else 0
            self._end(self._lookups.pop(outcome.job), found)
        elif outcome.job in self._stores and outcome.status is JobStatus.TIMED_OUT:
            self._lose(self._stores[outcome.job])  # its slots may be read until QUIET
        elif outcome.job in self._stores:
            self._end(self._stores.pop(outcome.job), outcome.num_blocks)

    def _finish_read(self, load: LoadOrder, outcome: JobOutcome) -> None:
        if outcome.status is JobStatus.TIMED_OUT:
            self._lost[outcome.job] = load.number
            self._lose(load.number)
            self._fail_rest(load, 0)
            return
        done = outcome.status is JobStatus.DONE
        self._fill_blocks(load, len(load.hashes) if done else outcome.num_blocks)

    def _fill_blocks(self, load: LoadOrder, num_read: int) -> None:
        """Copy the blocks that were read to the KV cache; vLLM computes the others."""
        start, end = load.num_host, load.num_host + num_read
        if num_read:
            self._pages.load(load.slots[start:end], load.block_ids[start:end])
        self._end(load.number, num_read)
        self._fail_rest(load, num_read)

    def _fail_rest(self, load: LoadOrder, num_read: int) -> None:
        self._failed.update(load.block_ids[load.num_host + num_read :])
        self._arrived.add(load.request)

    def _lose(self, number: int) -> None:
        self._report.ended.setdefault(number, []).append(OrderEnd(0, is_quiet=False))

    def _end(self, number: int, num_blocks: int) -> None:
        self._report.ended.setdefault(number, []).append(OrderEnd(num_blocks))
