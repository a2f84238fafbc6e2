"""The pool's blocks for links that map a peer's memory: copies from a peer's pool (`cuda`) or from
its staging buffers in main memory (`shm`), by the copy engine.

Each connection has its own stream, so a copy waits neither for the model nor for another peer.
The copies of a frame are one call. Runs of slots that are adjacent on both sides are one copy.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.device.blocks import DeviceBlocks
from headwater.device.gpu.runtime import Runtime
from headwater.device.gpu.virtual_memory import ExportedMemory, MappedMemory, import_memory
from headwater.device.kv import Ints, KVPool
from headwater.errors import ConfigError, DeviceError
from headwater.transfer.shared import SharedPages, map_shared
from headwater.transfer.slab import PAGE_BYTES

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
        """An empty view: the bytes are not in main memory."""
        return _NO_BYTES

    def map_peer(self, file: int, num_bytes: int) -> "CudaPeerBlocks":
        """Map the pool of a peer, for use by this thread."""
        return CudaPeerBlocks(self._pool, file, num_bytes)

    def map_host(self, memory: memoryview) -> "HostPeerBlocks":
        """Pin a peer's main memory, for use by this thread."""
        return HostPeerBlocks(self._pool, memory)

    def can_map_host(self) -> bool:
        """Whether this device can read main memory that is mapped read-only; tried with a
        page."""
        pages = SharedPages(PAGE_BYTES)
        try:
            HostPeerBlocks(self._pool, map_shared(pages.file, PAGE_BYTES)).close()
        except (ConfigError, DeviceError) as error:
            log.info("blocks of peers pass through staging buffers: reason=%s", error)
            return False
        return True


class _PeerCopies:
    """Blocks of a peer at an address that this device can read."""

    is_near = False

    def __init__(self, pool: KVPool, runtime: Runtime, address: int, num_bytes: int) -> None:
        self._pool = pool
        self._runtime = runtime
        self._address = address
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
            (self._address + source[starts] * self._block_bytes).tolist(),
            lengths.tolist(),
            self._stream.cuda_stream,
        )
        return CudaCopy(self._stream, spins=self.is_near)

    def close(self) -> None:
        """Unmap the peer's memory."""
        try:
            self._stream.synchronize()
            self._unmap()
        except (DeviceError, RuntimeError):  # torch's errors are RuntimeErrors
            log.exception("cannot unmap the memory of a peer")

    def _unmap(self) -> None:
        raise NotImplementedError


class CudaPeerBlocks(_PeerCopies):
    """The pool of a peer on a GPU, mapped here."""

    def __init__(self, pool: KVPool, file: int, num_bytes: int) -> None:
        runtime = Runtime(pool.device.index or 0)
        runtime.enter_thread()
        self._mapped: MappedMemory = import_memory(file, num_bytes, pool.device)
        self.is_near = self._mapped.is_near
        super().__init__(pool, runtime, self._mapped.address, num_bytes)

    def _unmap(self) -> None:
        self._mapped.close()


class HostPeerBlocks(_PeerCopies):
    """Blocks of a peer in main memory, pinned here."""

    def __init__(self, pool: KVPool, memory: memoryview) -> None:
        runtime = Runtime(pool.device.index or 0)
        runtime.enter_thread()
        # This reference keeps the memory mapped.
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        address = int(self._bytes.ctypes.data)
        runtime.pin(address, len(memory), read_only=True)
        super().__init__(pool, runtime, address, len(memory))

    def _unmap(self) -> None:
        self._runtime.unpin(self._address)


class CudaCopy:
    """The copies that were queued on a stream before this object was made."""

    def __init__(self, stream: torch.cuda.Stream, *, spins: bool) -> None:
        """With `spins`, the wait keeps a core busy: copies within a device take less than a
        millisecond, and a thread that sleeps until the device wakes it continues 0.2 ms
        late."""
        self._ended = torch.cuda.Event(blocking=not spins)
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
