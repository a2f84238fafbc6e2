"""Messages between the two sides of the connector: the scheduler decides, the workers move
bytes.

scheduler ── StepOrders (with every step) ──▶ worker of each rank
scheduler ◀── RankReport (with every step's output), those of all ranks in one ── worker
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(slots=True)
class LookupOrder:
    """Ask storage how many leading blocks of a run it has."""

    number: int
    hashes: list[bytes]


@dataclass(slots=True)
class LoadOrder:
    """Fill KV blocks of a request: the first `num_host` from host slots, the others from
    storage through the remaining slots."""

    number: int
    request: str
    block_ids: list[int]
    slots: list[int]
    num_host: int
    hashes: list[bytes]
    """Keys of the blocks that come from storage."""


@dataclass(slots=True)
class SaveOrder:
    """Copy KV blocks that this step completes to host slots."""

    number: int
    block_ids: list[int]
    slots: list[int]


@dataclass(slots=True)
class StoreOrder:
    """Write host slots to storage."""

    number: int
    slots: list[int]
    hashes: list[bytes]


@dataclass
class StepOrders(KVConnectorMetadata):
    """All orders that the workers start with one step."""

    lookups: list[LookupOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    computes: bool = True
    """Whether the step computes something. If so, nothing may delay it."""


@dataclass(slots=True)
class OrderEnd:
    """How an order ended on one rank."""

    num_blocks: int
    """Leading blocks that are good on this rank."""

    is_quiet: bool = True
    """Whether the rank cannot touch the slots any more. After False a second report follows."""


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """Orders that ended since the last report, by number."""

    ended: dict[int, list[OrderEnd]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RankReport":
        """The reports of two ranks joined into one."""
        assert isinstance(other, RankReport)
        merged = {number: list(ends) for number, ends in self.ended.items()}
        for number, ends in other.ended.items():
            merged.setdefault(number, []).extend(ends)
        return RankReport(merged)
