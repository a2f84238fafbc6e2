"""Copies blocks between the KV pool on a GPU and the host slab while the model computes.

The copy engines of the GPU execute batched copies of whole blocks, on one stream per direction,
and use no multiprocessor. Two threads per direction queue a job and wait for its event in C, so
that the copy engine has the next job when it finishes one.

    compute   ── write block ──●(recorded by start)              ╭─ wait ── attend in layer 8
                                ╲                                ╱
    copies                       ╰── wait ── copy, copy, copy ──●── copy … ──●(waited for in C)

A load is copied in groups of layers, so that a step may begin before the last group arrives.
Otherwise, blocks that are adjacent in both tiers are one copy.
"""

import logging
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch

from headwater.cache import JobStatus, LoadJob, TransferJob
from headwater.clock import Clock
from headwater.device.copier import CLOSE_TIMEOUT_S
from headwater.device.gpu.arrivals import Arrival, Arrivals
from headwater.device.gpu.pinned import PinnedSlab
from headwater.device.gpu.runtime import Runtime
from headwater.device.kv import BlockPart, KVPool
from headwater.errors import ConfigError, DeviceError
from headwater.transfer.completions import JobCompletion
from headwater.transfer.slab import HostSlab
from headwater.transfer.workers import Report
from headwater.types import Slots

log = logging.getLogger(__name__)

_GROUPS = 4
_MIN_PIECE_BYTES = 512 << 10
"""Smallest piece for which a load is divided into groups of layers. Smaller pieces would slow
the copy down by more than the time of a whole block."""

_THREADS = 2
"""Threads per direction: one waits for its copy while the other queues the next."""


class _Entry(NamedTuple):
    transfer: TransferJob
    report: Report
    after: torch.cuda.Event | None = None
    """Work of the model that must end before the copy."""

    arrival: Arrival | None = None
    """Records which layers of a load have arrived; None for an offload."""


class CudaCopier:
    """The `DeviceCopier` of a pool on a GPU."""

    def __init__(
        self,
        pool: KVPool,
        slab: HostSlab,
        clock: Clock,
        arrivals: Arrivals | None = None,
        *,
        for_links: bool = False,
    ) -> None:
        """`arrivals` belongs to the runner, which may then compute during loads. Buffers
        `for_links` get blocks of collected steps only, so no copy waits for the model."""
        self._pool = pool
        self._waits_for_model = not for_links
        self._arrivals = arrivals
        self._num_groups = 1
        if arrivals is not None and pool.num_layers % _GROUPS == 0:
            self._num_groups = _GROUPS if slab.block_bytes >= _GROUPS * _MIN_PIECE_BYTES else 1
        self._clock = clock
        self._part = pool.part
        if self._part is not None and self._part.whole.scale_bytes:
            raise ConfigError(
                "--kv-cache-dtype fp8 does not work with a host tier and several ranks on GPUs yet; "
                "leave it out or give --swap-space 0"
            )
        self._block_bytes = slab.block_bytes
        self._runtime = Runtime(pool.device.index or 0)
        self._pinned = PinnedSlab(slab, self._runtime, clock)
        self._queues: list[SimpleQueue[_Entry | None]] = []
        self._threads: list[Thread] = []
        for name in ("load", "offload"):
            queue: SimpleQueue[_Entry | None] = SimpleQueue()
            stream = torch.cuda.Stream(pool.device)
            self._queues.append(queue)
            for number in range(_THREADS):
                thread = Thread(
                    target=self._work,
                    args=(queue, stream),
                    name=f"{name}-{number}",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()

    @property
    def pinned_share(self) -> float:
        """Share of the slab that is pinned now."""
        return self._pinned.share

    def await_pinned(self, within_s: float) -> bool:
        """Wait until the whole slab is pinned, at most `within_s`; return whether it is."""
        return self._pinned.await_all(within_s)

    def start(self, transfer: TransferJob, report: Report) -> None:
        """Queue a copy after those of the same direction.

        An offload to the host tier follows all work of the model queued so far.
        The targets of a load were released by steps that are collected, so a load may overtake
        the queued work.
        """
        if isinstance(transfer, LoadJob):
            arrival = None
            if self._arrivals is not None:
                arrival = self._arrivals.expect(transfer.job, self._num_groups)
            self._queues[0].put(_Entry(transfer, report, arrival=arrival))
            return
        after = None
        if self._waits_for_model:
            after = torch.cuda.Event()
            after.record(torch.cuda.current_stream(self._pool.device))
        self._queues[1].put(_Entry(transfer, report, after=after))

    def close(self) -> None:
        """End the threads after their current copies, and unpin the slab. Calling it twice is
        safe."""
        for queue in self._queues:
            for _ in range(_THREADS):
                queue.put(None)
        torch.cuda.synchronize(self._pool.device)
        self._pinned.close()
        for thread in self._threads:  # as in `CpuCopier.close`
            thread.join(CLOSE_TIMEOUT_S)

    def _work(self, queue: "SimpleQueue[_Entry | None]", stream: torch.cuda.Stream) -> None:
        self._runtime.enter_thread()
        while (entry := queue.get()) is not None:
            transfer = entry.transfer
            began_s = self._clock.now()
            try:
                busy_s = self._copy(entry, stream)
                ended = JobCompletion(transfer.job, JobStatus.DONE, transfer.num_blocks, busy_s)
            except DeviceError:
                log.exception("a copy failed")
                waited_s = self._clock.now() - began_s
                ended = JobCompletion(transfer.job, JobStatus.FAILED, 0, waited_s, "device")
            except Exception:
                log.exception("a copy failed")
                ended = JobCompletion(transfer.job, JobStatus.FAILED, reason="bug")
            if entry.arrival is not None and self._arrivals is not None:
                entry.arrival.end()
                self._arrivals.forget(transfer.job)
            entry.report(ended)

    def _copy(self, entry: _Entry, stream: torch.cuda.Stream) -> float:
        """Copy, wait for the end, and return the time that the device took."""
        transfer = entry.transfer
        up = isinstance(transfer, LoadJob)
        host = transfer.source_slots if up else transfer.target_slots
        device = transfer.target_slots if up else transfer.source_slots
        self._pinned.await_slots(host)
        if entry.after is not None:
            stream.wait_event(entry.after)
        if self._part is not None:
            return self._copy_part(self._part, host, device, stream, up=up)
        num_groups = self._num_groups if up else 1
        sizes = [self._block_bytes // num_groups] * len(host)
        if num_groups == 1 and self._pinned.slot_bytes == self._block_bytes:
            starts, counts = runs(host, device, self._pinned.pieces_of(host))
            host, device = host[starts], device[starts]
            sizes = (counts * self._block_bytes).tolist()
        on_host = self._pinned.base + host * self._pinned.slot_bytes
        on_device = self._pool.blocks.data_ptr() + device * self._block_bytes
        source, target = (on_host, on_device) if up else (on_device, on_host)
        begun = torch.cuda.Event(enable_timing=True, blocking=True)
        ended = torch.cuda.Event(enable_timing=True, blocking=True)
        begun.record(stream)
        for group in range(num_groups):
            at = group * sizes[0]
            self._runtime.copy(
                (target + at).tolist(), (source + at).tolist(), sizes, stream.cuda_stream
            )
            if entry.arrival is not None:
                entry.arrival.record(stream)
        ended.record(stream)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    def _copy_part(
        self,
        part: BlockPart,
        host: Slots,
        device: Slots,
        stream: torch.cuda.Stream,
        *,
        up: bool,
    ) -> float:
        """Copy this rank's KV heads of each block, which are not contiguous in a whole
        block."""
        if not up and not part.is_written:
            return 0.0
        own, whole = self._pool.layout, part.whole
        head_bytes = whole.head_dim * whole.element_bytes
        num_rows = whole.num_layers * whole.planes * whole.block_tokens
        on_host = self._pinned.base + host * self._pinned.slot_bytes
        on_host += part.first_head * head_bytes
        on_device = self._pool.blocks.data_ptr() + device * own.block_bytes
        host_row, device_row = whole.kv_heads * head_bytes, own.kv_heads * head_bytes
        begun, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        begun.record(stream)
        for there, here in zip(on_host.tolist(), on_device.tolist(), strict=True):
            ends = (there, host_row), (here, device_row)
            source, target = ends if up else ends[::-1]
            self._runtime.copy_rows(target, source, (num_rows, device_row), stream.cuda_stream)
        ended.record(stream)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3


def runs(host: Slots, device: Slots, pieces: Slots) -> tuple[Slots, Slots]:
    """Runs of slots that are adjacent on both sides and pinned together: the start and length
    of each."""
    apart = (np.diff(host) != 1) | (np.diff(device) != 1) | (np.diff(pieces) != 0)
    starts = np.flatnonzero(np.append(True, apart))
    return starts, np.diff(np.append(starts, len(host)))
