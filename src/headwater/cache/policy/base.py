"""The interface of an eviction policy: an order over the evictable nodes of one tier.

The evictor decides how much is evicted. A node is in the order exactly while it may be evicted:
it has blocks in this tier, and no pin (device) or job (host) keeps them. The evictor takes a
node only when none of its children has blocks in the tier. A policy may therefore offer a
parent before its child; the evictor skips the parent until its children are gone.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headwater.cache.node import Node, RetentionMark
from headwater.cache.plan import Lease

if TYPE_CHECKING:
    from headwater.cache.policy.weights import Weights


class Hint(NamedTuple):
    """What a client says about its session when a request ends. A hint is optional, and a wrong
    hint slows down only its own session."""

    closed: bool = False
    """No more requests of this session will come."""

    returns_in_s: float | None = None
    """Another request will come in about this many seconds; None means soon."""


class FinishedRequest(NamedTuple):
    """What a policy learns about a request when it ends."""

    prompt_tokens: int
    output_tokens: int
    session: str = ""
    """The client's name for the session; empty if it gave none."""

    hint: Hint | None = None


class MarkedRun(NamedTuple):
    """Blocks of a path from the end of the previous run to `end`; they share one mark."""

    end: int
    mark: RetentionMark
    separate: bool = False
    """Whether the run gets a node of its own."""


class Shape(NamedTuple):
    """The cache that a policy works for."""

    device_blocks: int
    host_blocks: int
    block_tokens: int
    weights: "Weights | None" = None
    """Weights that a learning policy starts with."""


class EvictionPolicy(Protocol):
    """An order over the evictable nodes of one tier. Called by the engine loop's thread
    only."""

    def visit(self, lease: Lease, finished: FinishedRequest, now: float) -> Sequence[MarkedRun]:
        """Called when a request ends, before the nodes of its path are added. Returns the runs
        of the path with the marks that its nodes get; an empty result leaves the marks
        unchanged."""

    def add(self, node: Node, now: float) -> None:
        """Add `node`, which became evictable after being used, at the end of the order."""

    def add_cold(self, node: Node, now: float) -> None:
        """Add `node`, which became evictable again without being used, at the beginning of the
        order."""

    def close(self, node: Node) -> None:
        """The client said that no request will use `node` again: move it to the front of the
        order."""

    def discard(self, node: Node) -> None:
        """Remove `node` from the order: it must not be evicted now, or has no blocks in this
        tier any more."""

    def discard_all(self, nodes: Iterable[Node]) -> None:
        """Discard the nodes that were evicted in one batch."""

    def victims(self) -> Iterator[Node]:
        """The nodes, next victim first. The order does not change while it is read."""

    def __contains__(self, node: object) -> bool:
        """Whether `node` is in the order. Used by checks."""


class Orders(NamedTuple):
    """The orders of the two local tiers. They may share what they learn."""

    device: EvictionPolicy
    host: EvictionPolicy
