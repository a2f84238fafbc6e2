"""Values that the cache returns or receives: matches, leases, planned jobs, and how a job ended.

Building a value has no effect, so the receiver may print, compare or replay it. A lease is the
exception: it is a pin on a path with an owner, and it changes while its owner runs.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol, TypeAlias

from headwater.cache.keys import KeyScheme, Namespace, TokenPath
from headwater.cache.node import Node
from headwater.types import EMPTY, BlockKey, JobId, RequestId, Slots, Tier


class Lease:
    """A pin on a path with an owner. Its device blocks stay until it is released.

    Only `TieredCache` creates and changes it. It is released once, by its owner or by expiry.

    A lease grows when its owner commits. It survives splits, because it refers to the last
    node of its path, and a split leaves that node as the tail.
    """

    __slots__ = (
        "expires_s",
        "namespace",
        "node",
        "num_blocks",
        "owner",
        "path",
        "pending",
        "place",
        "prompt_tokens",
        "since",
        "slots",
    )

    def __init__(
        self,
        owner: RequestId,
        node: Node,
        num_blocks: int,
        path: TokenPath,
        now: float,
        expires_s: float | None,
    ) -> None:
        self.owner = owner
        self.node = node
        self.num_blocks = num_blocks
        """Leading blocks of the owner's path that are leased, or were committed since."""
        self.namespace: Namespace = path.namespace
        self.path = path
        """The longest known path of its owner: the prompt, later also the committed blocks."""
        self.prompt_tokens = len(path.tokens)
        self.since = now
        self.expires_s = expires_s
        self.slots: Slots = EMPTY
        """Device slots of the blocks found when the lease was created, in token order."""
        self.pending: TokenPath | None = None
        """The path that its owner announced, while part of it is not committed."""
        self.place: tuple[Node, bytes] | None = None
        """Key of the announcement: the node it continues, and its next block."""


class MissReason(Enum):
    """Why a match ended before the last requested block.

    A reason is looked up in the namespace of the request, so it reveals nothing about other
    tenants.
    """

    NEVER_SEEN = "never_seen"
    TOO_SHORT = "too_short"
    """The prompt has no full block that could be found."""

    EVICTED_DEVICE = "evicted_device"
    EVICTED_HOST = "evicted_host"
    EVICTED_STORAGE = "evicted_storage"
    DAMAGED = "damaged"
    """Storage had the block, but its checksum or header did not match."""

    IN_FLIGHT = "in_flight"
    """Another sequence is computing the block now."""

    __hash__ = object.__hash__  # Enum's own hash is three times as slow


class InFlight(NamedTuple):
    """The next `num_blocks` blocks are being computed by `sequence`."""

    sequence: RequestId
    num_blocks: int


class Match:
    """How far the cached prefix of one path reaches, tier by tier.

    blocks  |<-- device -->|<-- host -->|<-- storage -->|<-- to compute -->|
            0       device_blocks   + host_blocks   + storage_blocks    max_blocks

    A match pins nothing. It is not a frozen dataclass, because one is made per request and a
    frozen dataclass would cost more than the walk through the tree.
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
        """Why the match ended; None when every requested block is in some tier."""
        self.in_flight: InFlight | None = None
        self.loading: LoadJob | None = None
        """The job that is copying the first block after the device part to a higher tier."""

    @property
    def num_blocks(self) -> int:
        """Blocks found in any tier."""
        return self.device_blocks + self.host_blocks + self.storage_blocks


class JobOwner(Protocol):
    """The part of the scheduler or engine that asked for a job and is told how it ended.

    `TieredCache.finish_job` calls it on the engine loop's thread.
    """

    def finish_job(self, job: "Job", outcome: "JobOutcome", now: float) -> None:
        """`job` ended, and the cache has applied `outcome` already.

        Called once per job. After TIMED_OUT a transfer is reported a second time, when its
        executor can no longer touch its slots.
        """


@dataclass(slots=True, eq=False)
class TransferJob:
    """Copy blocks from one tier to the next: one job per run, never one per block.

    Device and host are addressed by slots, storage by keys; the unused field is empty. The
    cache keeps the slots of both sides from other use until the job ends.

    Not modified after it is built. Not frozen, because the engine loop builds several for each
    request and a frozen one takes three times as long.
    """

    job: JobId
    source: Tier
    target: Tier
    source_slots: Slots
    target_slots: Slots
    keys: tuple[BlockKey, ...] = ()
    parent: BlockKey | None = None
    """For a write to storage: key of the block before the first of `keys`."""

    owner: JobOwner | None = None
    """Called when the job ends; None if nothing depends on its end."""

    @property
    def num_blocks(self) -> int:
        return len(self.target_slots) or len(self.source_slots)


class LoadJob(TransferJob):
    """A transfer to a higher tier: host to device, or storage to host."""

    __slots__ = ()


class OffloadJob(TransferJob):
    """A transfer to a lower tier: device to host, or host to storage."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lookup:
    """Ask storage how many leading blocks of each of several paths it has.

    If it succeeds, its outcome is DONE with `found`: the number of leading blocks of each path.
    It holds no slots.
    """

    job: JobId
    questions: tuple[tuple[TokenPath, int], ...]
    """Each path, and how many of its leading blocks to ask for."""

    scheme: KeyScheme
    owner: JobOwner | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks asked for, over all paths."""
        return sum(num_blocks for _, num_blocks in self.questions)

    def runs(self) -> list[list[BlockKey]]:
        """The keys to ask for, by path. Hashing is slow, so the executor calls this in its
        own thread. The paths remember the keys, so that a commit does not compute them again."""
        return [self.scheme.of_path(path, num_blocks) for path, num_blocks in self.questions]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Removal:
    """Remove every block of this deployment from storage.

    If it succeeds, its outcome is DONE with the number of blocks removed. It holds no slots.
    """

    job: JobId
    owner: JobOwner | None = None
    num_blocks: int = 0
    """Always 0: the number of blocks is not known in advance."""


Job: TypeAlias = TransferJob | Lookup | Removal
"""Everything that can be started and ends with an outcome."""


class JobStatus(Enum):
    """How a job ended, as its executor reports it."""

    DONE = auto()
    PARTIAL = auto()
    """Only the leading `num_blocks` were copied."""

    FAILED = auto()
    DAMAGED = auto()
    """The leading `num_blocks` are good; what storage has after them must not be used."""

    ABSENT = auto()
    """The leading `num_blocks` are good; storage no longer has the blocks after them."""

    TIMED_OUT = auto()
    """The deadline passed. The executor may still touch the slots."""

    QUIET = auto()
    """The executor of a timed-out job has stopped and cannot touch the slots any more."""


@dataclass(slots=True, kw_only=True)
class JobOutcome:
    """The end of a job. A transfer that was TIMED_OUT has a second outcome when its executor is
    quiet.

    Not modified after it is built; not frozen for the same reason as `TransferJob`.
    """

    job: JobId
    status: JobStatus
    num_blocks: int = 0
    """For PARTIAL, DAMAGED and ABSENT: leading blocks that were copied completely. For a
    removal: blocks removed."""

    found: tuple[int, ...] = ()
    """For a lookup: leading blocks that storage has, by path."""


class JobEffect(Enum):
    """What the cache did with an outcome."""

    ATTACHED = auto()
    """At least one block is findable in its new tier."""

    NOTHING = auto()
    """No block became findable; what the job held is free again."""

    QUARANTINED = auto()
    """The job timed out; the slots that its executor may still touch stay unused until the
    executor is quiet."""

    DEFERRED = auto()
    """A step in flight uses the job's slots; `resume_job` will apply the outcome."""

    UNKNOWN = auto()
    """No such job is in flight: the outcome is a duplicate or too late. Nothing changed."""
