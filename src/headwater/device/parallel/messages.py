"""Messages between rank 0 and the other ranks outside steps."""

import struct
from enum import IntEnum
from typing import NamedTuple

import msgspec
import numpy as np

from headwater.cache import JobStatus, LoadJob, OffloadJob, TransferJob
from headwater.transfer.completions import JobCompletion
from headwater.types import JobId, Tier


class LoadModel(msgspec.Struct, frozen=True, kw_only=True):
    """Load this rank's part of a model."""

    model: str | None
    dtype: str
    device: str
    has_fp8_kv: bool = False
    rank: int
    size: int
    is_packed: bool = True


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The model is loaded."""

    free_bytes: int
    """Memory left on the rank's device."""


class MeetRanks(msgspec.Struct, frozen=True, kw_only=True):
    """Join the process group."""

    store: str
    """File through which the ranks join."""

    backend: str


class OpenRunner(msgspec.Struct, frozen=True, kw_only=True):
    """Create a runner of these sizes, as rank 0 does."""

    num_blocks: int
    block_tokens: int
    max_num_seqs: int
    max_batched_tokens: int
    min_rows: int
    """Steps have the same number of rows on every rank, so rank 0 decides the padding."""

    contiguous_bytes: int | None = None


class WarmPhase(IntEnum):
    """What ranks do together before the first step, in addition to the warm-up steps."""

    CAPTURE = 1
    """Capture graphs."""

    CLEAR = 2
    """Forget the warm-up steps."""


class MapSlab(msgspec.Struct, frozen=True, kw_only=True):
    """Map the host memory whose file is attached to this message."""

    slab: int
    num_slots: int
    block_bytes: int
    is_shared: bool


class CopyBlocks(NamedTuple):
    """A copy between every rank's pool and one slab."""

    serial: int
    """Serial number of the copy; its answers repeat it."""

    slab: int
    job: TransferJob

    def pack(self) -> memoryview:
        """The message as bytes."""
        is_load = isinstance(self.job, LoadJob)
        head = np.array((self.serial, self.slab, is_load), dtype=np.int64)
        whole = np.concatenate((head, self.job.source_slots, self.job.target_slots))
        return whole.astype(np.int64, copy=False).data.cast("B")

    @classmethod
    def unpack(cls, payload: memoryview) -> "CopyBlocks":
        """The message from its bytes."""
        ints = np.frombuffer(payload, dtype=np.int64)
        serial, slab, is_load = ints[:3].tolist()
        source, target = ints[3:].reshape(2, -1)
        job = (LoadJob if is_load else OffloadJob)(
            job=JobId(serial),
            source=Tier.HOST if is_load else Tier.DEVICE,
            target=Tier.DEVICE if is_load else Tier.HOST,
            source_slots=source,
            target_slots=target,
        )
        return cls(serial, slab, job)


_COPIED = struct.Struct("<q?d")


def pack_copied(completion: JobCompletion) -> bytes:
    """The end of a copy, whose serial number is the job of `completion`."""
    is_done = completion.status is JobStatus.DONE
    return _COPIED.pack(completion.job, is_done, completion.busy_s)


def unpack_copied(payload: memoryview) -> tuple[int, bool, float]:
    """Serial number of a copy, whether the copy succeeded, and how long it took."""
    serial, is_done, busy_s = _COPIED.unpack(payload)
    return serial, is_done, busy_s
