"""The cache's answers, as values: how far a match reaches, what to copy, how a copy ended.

Building one has no effect; whoever receives it may print, compare or replay it.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from headwater.cache.keys import KeyScheme, TokenPath
from headwater.cache.node import Node
from headwater.types import BlockKey, JobId, RequestId, Slots, Tier


class MissReason(Enum):
    """Why a match ended before the last block that was asked for.

    A reason is found in the asker's own namespace: it says nothing about other tenants.
    """

    NEVER_SEEN = "never_seen"
    TOO_SHORT = "too_short"
    """The prompt has no full block that could be found."""

    EVICTED_DEVICE = "evicted_device"
    EVICTED_HOST = "evicted_host"
    EVICTED_STORAGE = "evicted_storage"
    DAMAGED = "damaged"
    """It was found in storage, and could not prove what it is."""

    IN_FLIGHT = "in_flight"
    """Another sequence is computing it right now."""

    __hash__ = object.__hash__  # Enum's own is a Python function, three times as slow


class TierRange(NamedTuple):
    """Blocks [start, end) of a path are in `tier`."""

    tier: Tier
    start: int
    end: int


class InFlight(NamedTuple):
    """The next `num_blocks` blocks are being computed by `sequence`."""

    sequence: RequestId
    num_blocks: int


class Match:
    """How far the cached prefix of one path reaches, tier by tier.

    blocks  |<-- device -->|<-- host -->|<-- storage -->|<-- to compute -->|
            0       device_blocks   + host_blocks   + storage_blocks    max_blocks

    A value: nothing is pinned by it. Not a frozen dataclass, because one is made a request
    and that would cost more than the walk.
    """

    __slots__ = (
        "device_blocks",
        "host_blocks",
        "in_flight",
        "loading",
        "max_blocks",
        "nodes",
        "path",
        "reason",
        "storage_blocks",
        "version",
    )

    def __init__(
        self, path: TokenPath, max_blocks: int, nodes: list[Node], version: tuple[object, int]
    ) -> None:
        self.path = path
        self.max_blocks = max_blocks
        self.nodes = nodes
        self.version = version
        self.device_blocks = 0
        self.host_blocks = 0
        self.storage_blocks = 0
        self.reason: MissReason | None = None
        """Why it ended; None when every block that was asked for is in some tier."""
        self.in_flight: InFlight | None = None
        self.loading: JobId | None = None
        """The job that is bringing the first block beyond the device part one tier up."""

    @property
    def num_blocks(self) -> int:
        """Blocks found in any tier."""
        return self.device_blocks + self.host_blocks + self.storage_blocks

    @property
    def extents(self) -> tuple[TierRange, ...]:
        """The same as runs in position order; empty ones left out."""
        host_end = self.device_blocks + self.host_blocks
        runs = (
            TierRange(Tier.DEVICE, 0, self.device_blocks),
            TierRange(Tier.HOST, self.device_blocks, host_end),
            TierRange(Tier.STORAGE, host_end, host_end + self.storage_blocks),
        )
        return tuple(run for run in runs if run.start < run.end)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferJob:
    """Copy a run of blocks from one tier to the next; one value a run, never one a block.

    A tier of slots is addressed by slots, storage by keys; the unused one is empty. Source and
    target stay pinned until the job has landed and its executor is quiet.
    """

    job: JobId
    source: Tier
    target: Tier
    source_slots: Slots
    target_slots: Slots
    keys: tuple[BlockKey, ...] = ()
    parent: BlockKey | None = None
    """Key of the block before the first of `keys`, for a write to storage."""

    @property
    def num_blocks(self) -> int:
        return max(len(self.source_slots), len(self.target_slots))


class Promotion(TransferJob):
    """Up a tier: host to device, or storage to host."""


class Demotion(TransferJob):
    """Down a tier: device to host, or host to storage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lookup:
    """Ask storage, of each of some paths, how many of its first so many blocks it has.

    Its outcome is DONE with the number of leading blocks found of each. It holds nothing.
    """

    job: JobId
    questions: tuple[tuple[TokenPath, int], ...]
    scheme: KeyScheme

    @property
    def num_blocks(self) -> int:
        """Blocks that are asked for, of all paths."""
        return sum(num_blocks for _, num_blocks in self.questions)

    def runs(self) -> list[list[BlockKey]]:
        """What to ask for, by path. Pure and slow, so made by whoever asks, in whatever thread."""
        stride, chain = self.scheme.block_tokens * 4, self.scheme.chain
        return [
            chain(
                self.scheme.root(path.namespace), path.view[: num_blocks * stride], path.media
            )
            for path, num_blocks in self.questions
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Removal:
    """Have storage forget every block of this deployment.

    Its outcome is DONE with the number of blocks there were. It holds nothing.
    """

    job: JobId
    num_blocks: int = 0
    """How many there are is not known before."""


class JobStatus(Enum):
    """How a job ended, as its executor tells it."""

    DONE = auto()
    PARTIAL = auto()
    """Only the leading `num_blocks` were copied."""

    FAILED = auto()
    DAMAGED = auto()
    """The leading `num_blocks` are good; what storage has after them is not to be used."""

    ABSENT = auto()
    """The leading `num_blocks` are good; storage no longer has what follows them."""

    TIMED_OUT = auto()
    """Nobody waits any longer, but the executor may still touch the slots."""

    QUIET = auto()
    """The executor of a timed-out job will touch nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """The one end of a job; after TIMED_OUT a second one says that it is quiet."""

    job: JobId
    ending: JobStatus
    num_blocks: int = 0
    """For PARTIAL, DAMAGED and ABSENT: leading blocks that arrived whole."""

    found: tuple[int, ...] = ()
    """Of a lookup: leading blocks that storage has, by path."""


class JobEffect(Enum):
    """What the cache did with an outcome."""

    ATTACHED = auto()
    """At least one block is findable in its new tier."""

    NOTHING = auto()
    """Nothing became findable; what the job held is free again."""

    QUARANTINED = auto()
    """The job timed out; its slots wait until its executor is quiet."""

    UNKNOWN = auto()
    """No such job is in flight: a duplicate, or later than its end. Nothing changed."""
