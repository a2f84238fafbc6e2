"""A node of the prefix tree: a run of blocks, and where each of them is.

In each tier a node has a *leading* part of its run, so three lengths say everything:

    blocks    0 . . . . . . . num_blocks
    device    |=======|                     len(device) slots
    host      |=============|               len(host) slots
    storage   |===|                         num_stored

The longest of the three is `num_blocks`: a block that left its last tier is not in the tree.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from headwater.types import EMPTY, BlockKey

if TYPE_CHECKING:
    from headwater.cache.jobs import JobRecord
    from headwater.cache.keys import Namespace
    from headwater.cache.plan import MissReason


class RetentionMark(NamedTuple):
    """What an eviction policy remembers of a run: when it was used, and what it is like."""

    used_s: float
    run_class: int


class Node:
    """Owned by `PrefixTree`; its residency is changed by `TieredCache` and its parts only.

    A split makes a new node for the *head* and leaves this one the tail, so whoever refers to
    a node refers to the same last block for ever, or sees `gone`.
    """

    __slots__ = (
        "children",
        "device",
        "device_children",
        "first",
        "gone",
        "hits",
        "host",
        "host_children",
        "jobs",
        "keys",
        "lost",
        "mark",
        "media",
        "namespace",
        "num_blocks",
        "num_stored",
        "parent",
        "pins",
        "settled",
        "start",
        "tokens",
        "uid",
        "used",
    )

    def __init__(self, parent: "Node | None", first: bytes, start: int, uid: int) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.first = first
        """What the parent finds this node by: the bytes of the first block and its media."""
        self.start = start
        """Blocks before this node on its path."""
        self.uid = uid
        self.num_blocks = 0
        self.tokens = b""
        """`num_blocks` blocks of int32; after those, some that it had before it was cut short."""
        self.lost: MissReason | None = None
        """Why the block that follows in `tokens`, if one does, is not here any more."""
        self.media: Mapping[int, bytes] | None = None
        self.namespace: Namespace | None = None
        """Of a root: whose blocks are below it."""
        self.keys: list[BlockKey] | None = None
        """Content keys of the leading blocks, once somebody asked."""
        self.device = EMPTY
        self.host = EMPTY
        self.num_stored = 0
        self.device_children = 0
        """Children with blocks on the device; likewise below."""
        self.host_children = 0
        self.pins = 0
        """Leases and jobs that go through this node; a pin on a node is on all above it too."""
        self.jobs: tuple[JobRecord, ...] = ()
        self.hits = 0
        self.settled = -1
        """The `used` at which the last write of this node was settled."""
        self.used = 0
        """Tick of the last release; orders nodes by age."""
        self.mark: RetentionMark | None = None
        """Set when the path is released, and read, by policies that mark runs."""
        self.gone = False
        """Terminal: no longer in the tree. It keeps slots only while it is pinned."""

    @property
    def end(self) -> int:
        """Blocks up to and including this node on its path."""
        return self.start + self.num_blocks

    def covered(self) -> int:
        """Leading blocks that are in some tier."""
        return max(len(self.device), len(self.host), self.num_stored)
