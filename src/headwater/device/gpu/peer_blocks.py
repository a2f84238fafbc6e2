"""The pool's blocks for the `cuda` link: copies from a peer's pool, by the copy engine.

Each connection has its own stream, so a copy waits neither for the model nor for another peer.
The copies of a frame are one call. Runs of slots that are adjacent on both sides are one copy.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from headwater.device.blocks import DeviceBlocks
from headwater.device.gpu.runtime import Runtime
from headwater.device.gpu.virtual_memory import ExportedMemory, MappedMemory, import_memory
from headwater.device.kv import Ints, KVPool
from headwater.errors import DeviceError

log = logging.getLogger(__name__)

_NO_BYTES = memoryview(b"")


class CudaBlocks(DeviceBlocks):
    """The blocks of a pool on a GPU; the `DeviceMemory` of the `cuda` link."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        exported = pool.pages
        self.file = None if exported is None else exported.file
        self.num_bytes = (
            exported.num_bytes if isinstance(exported, ExportedMemory) else pool.num_bytes
        )

    def view(self, slot: int) -> memoryview:
        """No bytes: they are not in main memory."""
        return _NO_BYTES

    def map_peer(self, file: int, num_bytes: int) -> "CudaPeerBlocks":
        """Map the pool of a peer, for use by this thread."""
        return CudaPeerBlocks(self._pool, file, num_bytes)


class CudaPeerBlocks:
    """The pool of a peer, mapped here."""

    def __init__(self, pool: KVPool, file: int, num_bytes: int) -> None:
        self._runtime = Runtime(pool.device.index or 0)
        self._runtime.enter_thread()
        self._mapped: MappedMemory = import_memory(file, num_bytes, pool.device)
        self._pool = pool
        self._block_bytes = pool.block_bytes
        self.num_slots = num_bytes // pool.block_bytes
        self._stream = torch.cuda.Stream(pool.device)

    def start_copy(
        self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> "CudaCopy":
        """Queue the copies of one frame."""
        source, target, size = (
            np.array(values, dtype=np.int64) for values in (sources, targets, sizes)
        )
        starts, lengths = merge_runs(source, target, size, self._block_bytes)
        self._runtime.copy(
            (self._pool.blocks.data_ptr() + target[starts] * self._block_bytes).tolist(),
            (self._mapped.address + source[starts] * self._block_bytes).tolist(),
            lengths.tolist(),
            self._stream.cuda_stream,
        )
        return CudaCopy(self._stream)

    def close(self) -> None:
        """Unmap the peer's pool."""
        try:
            self._stream.synchronize()
            self._mapped.close()
        except (DeviceError, RuntimeError):  # torch's errors are RuntimeErrors
            log.exception("cannot unmap the device memory of a peer")


class CudaCopy:
    """Everything that was queued on a stream until now."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._ended = torch.cuda.Event(blocking=True)
        self._ended.record(stream)

    def wait(self) -> None:
        """Wait in C, without the interpreter lock."""
        try:
            self._ended.synchronize()
        except RuntimeError as error:
            raise DeviceError(f"the device reports an error: {error}") from error


def merge_runs(source: Ints, target: Ints, size: Ints, block_bytes: int) -> tuple[Ints, Ints]:
    """Runs of whole blocks that are adjacent on both sides: the start and bytes of each."""
    apart = (np.diff(source) != 1) | (np.diff(target) != 1) | (size[:-1] != block_bytes)
    starts = np.flatnonzero(np.append(True, apart))
    return starts, np.add.reduceat(size, starts)
