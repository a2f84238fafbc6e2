"""Copies blocks between the KV pool and the host slab, while the model computes.

On a CPU both are main memory. Two threads, one per direction, copy whole blocks without the
interpreter lock. A GPU has another class with the same `DeviceCopier` interface.
"""

import logging
from collections.abc import Iterator
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from headwater.cache import JobStatus, LoadJob, TransferJob
from headwater.clock import Clock
from headwater.device.kv import KVPool
from headwater.transfer.completions import JobCompletion
from headwater.transfer.layout import KVLayout
from headwater.transfer.pages import PageMaker
from headwater.transfer.slab import HostSlab
from headwater.transfer.workers import Report
from headwater.types import Slots

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

CLOSE_TIMEOUT_S = 10.0
"""Longest wait for one thread of a copier that is closed."""

_PIECE_BLOCKS = 8
"""Maximum number of blocks in one copy; between two copies other threads can use the
processor."""

_REPORT_WITHIN_S = 0.002
"""Copies that end one after another are reported together, the first of them at most this much
later. Otherwise the loop starts a step with the sequence whose load ended first, and the others
wait for the whole step."""


class CpuCopier:
    """The `DeviceCopier` of a pool in main memory."""

    def __init__(
        self, pool: KVPool, slab: HostSlab, clock: Clock, *, makes_pages: bool = False
    ) -> None:
        """With `makes_pages`, a thread allocates the pages of the slab before they are used."""
        self._pool = pool
        self.pages = PageMaker(slab.memory, clock) if makes_pages else None
        self._places: list[tuple[Bytes, Bytes]] = [(slab.rows, pool.blocks.numpy())]
        """Host and device memory by slot: what is copied for each block."""
        self._writes = pool.part is None or pool.part.is_written
        if pool.part is not None:
            heads = slice(pool.part.first_head, pool.part.end_head)
            whole = [by_head[..., heads, :] for by_head in _by_head(slab.rows, pool.part.whole)]
            own = _by_head(pool.blocks.numpy(), pool.layout)
            self._places = list(zip(whole, own, strict=True))
        self._clock = clock
        self._queues: list[SimpleQueue[tuple[TransferJob, Report] | None]] = []
        self._threads: list[Thread] = []
        for name in ("load", "offload"):
            queue: SimpleQueue[tuple[TransferJob, Report] | None] = SimpleQueue()
            self._queues.append(queue)
            thread = Thread(target=self._work, args=(queue,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def start(self, transfer: TransferJob, report: Report) -> None:
        """Queue a copy behind those of the same direction."""
        up = isinstance(transfer, LoadJob)
        if up:
            self._pool.mark_written(transfer.target_slots)
        self._queues[0 if up else 1].put((transfer, report))

    def close(self) -> None:
        """End the threads after the copies that were started. Calling it twice is safe."""
        if self.pages is not None:
            self.pages.close()
        for queue in self._queues:
            queue.put(None)
        # A thread that frees torch's memory while the interpreter ends aborts the process.
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _work(self, queue: "SimpleQueue[tuple[TransferJob, Report] | None]") -> None:
        unreported: list[tuple[Report, JobCompletion]] = []
        until_s = block_s = 0.0
        while (entry := queue.get()) is not None:
            transfer, report = entry
            began = self._clock.now()
            if began + transfer.num_blocks * block_s > until_s:
                _report_all(unreported)
            try:
                self._copy(transfer)
                ended = JobCompletion(transfer.job, JobStatus.DONE, transfer.num_blocks)
            except Exception:
                log.exception("a copy between device and host failed")
                ended = JobCompletion(transfer.job, JobStatus.FAILED, reason="bug")
            now = self._clock.now()
            block_s = (now - began) / transfer.num_blocks
            if not unreported:
                until_s = now + _REPORT_WITHIN_S
            unreported.append((report, ended._replace(busy_s=now - began)))
            if queue.empty():
                _report_all(unreported)
        _report_all(unreported)

    def _copy(self, transfer: TransferJob) -> None:
        up = isinstance(transfer, LoadJob)
        if not up and not self._writes:
            return
        for host, device in self._places:
            source, target = (host, device) if up else (device, host)
            for at, to, count in _runs(transfer.source_slots, transfer.target_slots):
                np.copyto(target[to : to + count], source[at : at + count])


def _report_all(unreported: list[tuple[Report, JobCompletion]]) -> None:
    for report, completion in unreported:
        report(completion)
    unreported.clear()


def _by_head(blocks: Bytes, layout: KVLayout) -> list[Bytes]:
    """Views of numbers and scales as `[blocks, layers, planes * tokens, heads, bytes]`."""
    layers = blocks.reshape(len(blocks), layout.num_layers, layout.layer_bytes)
    rows = layout.planes * layout.block_tokens
    shape = (len(blocks), layout.num_layers, rows, layout.kv_heads, -1)
    views = [layers[:, :, : layout.numbers_bytes].reshape(shape)]
    if layout.scale_bytes:
        views.append(layers[:, :, layout.numbers_bytes :].reshape(shape))
    return views


def _runs(sources: Slots, targets: Slots) -> Iterator[tuple[int, int, int]]:
    """Source, target and count of each piece that is contiguous on both sides."""
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    bounds = [0, *breaks.tolist(), len(sources)]
    for start, end in pairwise(bounds):
        for at in range(start, end, _PIECE_BLOCKS):
            yield int(sources[at]), int(targets[at]), min(end - at, _PIECE_BLOCKS)
