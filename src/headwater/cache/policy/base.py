"""What an eviction policy is: an order over the evictable nodes of one tier.

How much goes is the evictor's business. A node is in the order exactly while it may be
evicted: it has blocks in this tier and nobody has pinned it. The evictor takes a node only when
its children are gone from the tier, so a policy may offer a parent before its child; it is
then passed over until its turn comes.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headwater.cache.node import Node, RetentionMark
from headwater.cache.plan import Lease

if TYPE_CHECKING:
    from headwater.cache.policy.weights import Weights


class Hint(NamedTuple):
    """What a client says of its session when a request of it ends. Soft: nothing needs it, and
    a wrong one costs its own session at most."""

    closed: bool = False
    """Nothing more of the session will come."""

    returns_in_s: float | None = None
    """Something more will come, about then; None is soon."""


class FinishedRequest(NamedTuple):
    """What a request was, once it has ended."""

    prompt_tokens: int
    output_tokens: int
    session: str = ""
    """Its client's name for the session; empty for none."""

    hint: Hint | None = None


class MarkedRun(NamedTuple):
    """Blocks of a path up to `end`, from where the run before ends, share one mark."""

    end: int
    mark: RetentionMark
    separate: bool = False
    """Whether the run gets a node of its own."""


class Shape(NamedTuple):
    """What a policy is told of the cache it is for."""

    device_blocks: int
    host_blocks: int
    block_tokens: int
    weights: "Weights | None" = None
    """To begin with, for policies that learn."""


class EvictionPolicy(Protocol):
    """An order over the evictable nodes of one tier. Called by the decider thread only."""

    def visit(self, lease: Lease, finished: FinishedRequest, now: float) -> Sequence[MarkedRun]:
        """A request ends, and its path is about to be added. Returns the runs of the path,
        whose marks its nodes are to have; none leaves the marks as they are."""

    def add(self, node: Node, now: float) -> None:
        """`node` became evictable after being used: last in the order."""

    def add_cold(self, node: Node, now: float) -> None:
        """`node` became evictable again without being used: first in the order."""

    def close(self, node: Node) -> None:
        """Nobody will ask for `node` again, it is said: among the first in the order, in which
        it is already."""

    def discard(self, node: Node) -> None:
        """`node` is pinned, or has no blocks here any more."""

    def discard_all(self, nodes: Iterable[Node]) -> None:
        """The same for many: those evicted in one batch."""

    def victims(self) -> Iterator[Node]:
        """The nodes, first to go first. The order does not change while this is read."""

    def __contains__(self, node: object) -> bool:
        """Whether `node` is in the order; for checks."""


class Orders(NamedTuple):
    """The orders of the two local tiers; they may know things in common."""

    device: EvictionPolicy
    host: EvictionPolicy
