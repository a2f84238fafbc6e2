"""A device whose memory is main memory, for tests of the `cuda` link without a GPU.

A copy runs in a thread of its own, as on a device: it is in progress when `start_copy` returns,
and a test can hold it there.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import numpy as np
from numpy.typing import NDArray

from headwater.errors import DeviceError
from headwater.transfer.shared import map_shared

_WAIT_S = 30.0


class DeviceGate:
    """Controls the copies of one device double."""

    def __init__(self) -> None:
        self.opened = Event()
        self.opened.set()
        self.begun = Event()
        """Set when a copy has begun. The copy continues when `opened` is set."""

        self.fails = False
        """Whether copies fail."""

        self.refuses = False
        """Whether the memory of peers cannot be mapped."""


class PeerArray:
    """Memory of a peer that is mapped read-only; copies go to `target`, `[slots, block_bytes]`."""

    is_near = True

    def __init__(self, memory: memoryview, target: NDArray[np.uint8], gate: DeviceGate) -> None:
        block_bytes = target.shape[1]
        self.num_slots = len(memory) // block_bytes
        whole = np.frombuffer(memory, dtype=np.uint8)
        self._rows = whole[: self.num_slots * block_bytes].reshape(-1, block_bytes)
        self._target = target
        self._gate = gate
        self._thread = ThreadPoolExecutor(1, "device-double")

    @classmethod
    def mapped(
        cls, file: int, num_bytes: int, target: NDArray[np.uint8], gate: DeviceGate
    ) -> "PeerArray":
        """The memory behind a descriptor."""
        if gate.refuses:
            raise DeviceError("the device double maps nothing")
        try:
            return cls(map_shared(file, num_bytes), target, gate)
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceError(f"cannot map memory: {error}") from error

    def start_copy(
        self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> "ArrayCopy":
        return ArrayCopy(self._thread.submit(self._copy, sources, targets, sizes))

    def close(self) -> None:
        self._thread.shutdown()

    def _copy(
        self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self._gate.begun.set()
        assert self._gate.opened.wait(_WAIT_S), "the gate was never opened"
        if self._gate.fails:
            raise DeviceError("the device double copies nothing")
        for source, target, size in zip(sources, targets, sizes, strict=True):
            self._target[target, :size] = self._rows[source, :size]


class ArrayCopy:
    """A copy of the device double."""

    def __init__(self, copying: "Future[None]") -> None:
        self._copying = copying

    def wait(self) -> None:
        self._copying.result()
