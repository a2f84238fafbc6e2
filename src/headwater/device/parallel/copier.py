"""Copies blocks between the pools of all ranks and one host slab: each rank its own KV heads.

    rank 0 pool  [layers, 2, tokens, own heads] ──╮
    rank 1 pool  [layers, 2, tokens, own heads] ──┴─▶ slab row [layers, 2, tokens, all heads]

A block below the device is complete, and its bytes do not depend on the number of ranks.
"""

from functools import partial
from itertools import count
from threading import Lock

import msgspec
import numpy as np

from headwater.cache import JobStatus, TransferJob
from headwater.device.blocks import DeviceBlocks
from headwater.device.kv import KVPool
from headwater.device.parallel.channel import RankFrame, RankMessage
from headwater.device.parallel.messages import CopyBlocks, MapSlab, unpack_copied
from headwater.device.parallel.ranks import Ranks
from headwater.errors import EngineDead
from headwater.transfer.completions import JobCompletion
from headwater.transfer.mover import DeviceCopier
from headwater.transfer.slab import HostSlab
from headwater.transfer.workers import Report
from headwater.types import Slots

_MAP_TIMEOUT_S = 60.0
"""Time for every rank to map a slab; a rank that computes a step finishes the step first."""


class _SharedCopy:
    """A copy that some ranks have not finished."""

    def __init__(self, job: TransferJob, report: Report, num_ranks: int) -> None:
        self.job = job
        self.report = report
        self.num_left = num_ranks
        self.is_done = True
        self.busy_s = 0.0

    def end_one(self, is_done: bool, busy_s: float) -> JobCompletion | None:
        """Record that one rank has finished its part. Returns the completion of the whole copy
        when the last one has finished."""
        self.num_left -= 1
        self.is_done &= is_done
        self.busy_s = max(self.busy_s, busy_s)
        if self.num_left:
            return None
        if self.is_done:
            return JobCompletion(self.job.job, JobStatus.DONE, self.job.num_blocks, self.busy_s)
        return JobCompletion(self.job.job, JobStatus.FAILED, 0, self.busy_s, "rank")


class RankCopies:
    """The copies of one engine that have begun, by serial number. Thread-safe."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._lock = Lock()
        self._serials = count()
        self._slabs = count()
        self._begun: dict[int, _SharedCopy] = {}
        ranks.on_copied(self._heard)

    def open(self, own: DeviceCopier, slab: HostSlab) -> "ParallelCopier":
        """A copier between the pools of all ranks and `slab`; `own` copies this rank's part."""
        number = next(self._slabs)
        told = MapSlab(
            slab=number,
            num_slots=slab.num_slots,
            block_bytes=slab.block_bytes,
            is_shared=slab.is_shared,
        )
        self.ranks.tell(RankMessage.SLAB, msgspec.json.encode(told), [slab.rank_file])
        self.ranks.hear(RankMessage.MAPPED, timeout_s=_MAP_TIMEOUT_S)
        slab.seal()
        return ParallelCopier(self, own, number)

    def begin(self, job: TransferJob, report: Report) -> int:
        """Register a copy that every rank must finish; return its serial number."""
        with self._lock:
            serial = next(self._serials)
            self._begun[serial] = _SharedCopy(job, report, self.ranks.size)
        return serial

    def end_one(self, serial: int, is_done: bool, busy_s: float) -> None:
        """Record that a rank has finished its part. Any thread may call it."""
        with self._lock:
            copy = self._begun[serial]
            ended = copy.end_one(is_done, busy_s)
            if ended is not None:
                del self._begun[serial]
        if ended is not None:
            copy.report(ended)

    def _heard(self, rank: int, frame: RankFrame) -> None:
        self.end_one(*unpack_copied(frame.payload))


class RankedBlocks(DeviceBlocks):
    """The slots of every rank's pool, for links."""

    def __init__(self, pool: KVPool, ranks: Ranks) -> None:
        super().__init__(pool)
        self._ranks = ranks

    def mark_written(self, slots: Slots) -> None:
        """Record on every rank that a link or copy wrote to `slots`."""
        super().mark_written(slots)
        numbers = np.ascontiguousarray(slots, dtype=np.int64)
        self._ranks.tell(RankMessage.MARK, numbers.data.cast("B"))


class ParallelCopier:
    """The `DeviceCopier` of an engine with several ranks, for one slab.

    A job is done when every rank has copied its part, and failed when one could not. It is
    reported only when no rank touches its slots any more.
    """

    def __init__(self, copies: RankCopies, own: DeviceCopier, slab: int) -> None:
        self._copies = copies
        self._own = own
        self._slab = slab
        self._is_open = True

    def start(self, transfer: TransferJob, report: Report) -> None:
        """Let every rank copy its part."""
        copies = self._copies
        serial = copies.begin(transfer, report)
        copies.ranks.tell(RankMessage.COPY, CopyBlocks(serial, self._slab, transfer).pack())
        self._own.start(transfer, partial(self._ended, serial))

    def close(self) -> None:
        """End the copiers of all ranks. Calling it twice is safe."""
        self._own.close()
        if self._is_open:
            self._is_open = False
            try:
                number = self._slab.to_bytes(8, "little")
                self._copies.ranks.tell(RankMessage.DROP_SLAB, number)
            except EngineDead:
                return  # ranks that are gone hold no slab

    def _ended(self, serial: int, completion: JobCompletion) -> None:
        is_done = completion.status is JobStatus.DONE
        self._copies.end_one(serial, is_done, completion.busy_s)
