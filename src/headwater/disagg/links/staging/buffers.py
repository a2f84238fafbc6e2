"""Staging buffers in host memory, and the copies between them and the device."""

import logging
from collections.abc import Callable, Sequence
from itertools import count
from threading import Condition
from typing import TypeAlias

import numpy as np

from headwater.cache import JobStatus, LoadJob, OffloadJob, TransferJob
from headwater.transfer.completions import JobCompletion
from headwater.transfer.mover import DeviceCopier
from headwater.transfer.slab import HostSlab
from headwater.types import JobId, Tier

log = logging.getLogger(__name__)

OpenCopier: TypeAlias = Callable[[HostSlab], DeviceCopier]
"""Makes the copier between the device and a slab."""

OnCopied: TypeAlias = Callable[[bool], None]
"""Called once, from any thread, with whether the copy succeeded."""

_Place: TypeAlias = tuple[Tier, Sequence[int]]


class Buffers:
    """The buffers of one slab, which of them are free, and copies to the device. Thread-safe."""

    def __init__(self, slab: HostSlab, copier: DeviceCopier) -> None:
        self.block_bytes = slab.block_bytes
        self._slab = slab
        self._copier = copier
        self._changed = Condition()
        self._free = list(range(slab.num_slots))
        self._jobs = count()

    def view(self, buffer: int) -> memoryview:
        """The bytes of a buffer, not a copy."""
        return self._slab.view(buffer)

    def take(self, num: int) -> list[int] | None:
        """`num` buffers; None if fewer are free."""
        with self._changed:
            if len(self._free) < num:
                return None
            taken, self._free = self._free[:num], self._free[num:]
            return taken

    def await_one(self, timeout_s: float, is_over: Callable[[], bool]) -> int | None:
        """Wait for one buffer and return it; None after `timeout_s`, or when `is_over` returns
        true. Each `wake` makes the waiting thread call `is_over` again."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or is_over(), timeout_s)
            return self._free.pop() if self._free and not is_over() else None

    def wake(self) -> None:
        """Wake the threads that wait for a buffer."""
        with self._changed:
            self._changed.notify_all()

    def give_back(self, buffers: Sequence[int]) -> None:
        """Free the buffers."""
        with self._changed:
            self._free.extend(buffers)
            self._changed.notify_all()

    def load(self, slots: Sequence[int], buffers: Sequence[int], on_copied: OnCopied) -> None:
        """Copy device blocks into buffers."""
        self._copy(OffloadJob, (Tier.DEVICE, slots), (Tier.HOST, buffers), on_copied)

    def store(self, buffers: Sequence[int], slots: Sequence[int], on_copied: OnCopied) -> None:
        """Copy buffers into device slots."""
        self._copy(LoadJob, (Tier.HOST, buffers), (Tier.DEVICE, slots), on_copied)

    def close(self) -> None:
        """Stop copying. Calling it twice is safe."""
        self._copier.close()

    def _copy(
        self, kind: type[TransferJob], source: _Place, target: _Place, on_copied: OnCopied
    ) -> None:
        transfer = kind(
            job=JobId(next(self._jobs)),
            source=source[0],
            target=target[0],
            source_slots=np.array(source[1], dtype=np.int64),
            target_slots=np.array(target[1], dtype=np.int64),
        )

        def report(completion: JobCompletion) -> None:
            on_copied(completion.status is JobStatus.DONE)

        try:
            self._copier.start(transfer, report)
        except Exception:
            log.exception("cannot start a copy between staging buffers and the device")
            on_copied(False)
