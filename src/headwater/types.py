"""Types that every layer shares: one for each kind of integer, and the tiers in order."""

from enum import Enum, IntEnum
from typing import Literal, NamedTuple, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

BlockKey = NewType("BlockKey", bytes)
"""Hash, 32 bytes, of one block *and everything before it*."""

JobId = NewType("JobId", int)
"""Number of one transfer job; a cache never uses it twice."""

RequestId = NewType("RequestId", str)
"""Name of one request, unique among those alive on an instance."""

Tokens: TypeAlias = NDArray[np.int32]
"""Token ids, as an array from the tokenizer to the tree."""

Slots: TypeAlias = NDArray[np.int64]
"""Slots of blocks in one tier's pool, in position order. 64-bit, because numpy indexes with
them five times as fast as with 32-bit integers."""

EMPTY: Slots = np.empty(0, dtype=np.int64)
"""No slots. Shared, so it must not be written to."""

EMPTY.flags.writeable = False


LoadPolicy: TypeAlias = Literal["priced", "best_effort", "wait", "deadline"]
"""What to do about blocks on the host or in storage. `priced`: load or compute, whichever is
measured to be cheaper; `best_effort`: the same, but never wait for storage; `wait`: always load
everything; `deadline`: always load, up to a deadline."""


class LinkRate(NamedTuple):
    """Measured speed of one link: a job of n blocks takes `latency_s + n * block_s` seconds."""

    latency_s: float
    block_s: float
    num_parallel: int = 1
    """Number of jobs that the link carries at once. The times above were measured while other
    jobs ran too."""

    def job_s(self, num_blocks: float, num_queued: float) -> float:
        """Expected seconds of a job of `num_blocks`, after `num_queued` blocks of others."""
        blocks = num_queued / self.num_parallel + num_blocks
        return self.latency_s + blocks * self.block_s


class Tier(IntEnum):
    """Where a block's bytes can be, fastest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class WritePolicy(Enum):
    """When a device block is also written to the host tier."""

    AUTO = "auto"
    """Write a block before it is evicted from the device. While the host has free slots, also
    write each run of 16 blocks that a request has computed, and the rest when it ends."""

    WRITE_THROUGH = "write_through"
    """Write a block as soon as it is committed."""

    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Write a block when it has been hit often enough."""

    WRITE_BACK = "write_back"
    """Write a block when it is about to be evicted from the device."""

    NONE = "none"
    """Write no block: an evicted block is dropped."""
