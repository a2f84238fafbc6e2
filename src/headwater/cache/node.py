"""A node of the prefix tree: a run of consecutive blocks, and where each of them is.

In each tier a node has a *leading* part of its run, so three lengths describe it completely:

    blocks    0 . . . . . . . num_blocks
    device    |=======|                     len(device) slots
    host      |=============|               len(host) slots
    storage   |===|                         num_stored

The longest of the three is `num_blocks`: a block that left its last tier is not in the tree.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from headwater.cache.keys import SHARED, KeyScheme, Namespace
from headwater.errors import InvariantError
from headwater.native.block_keys import next_key
from headwater.types import EMPTY, BlockKey

if TYPE_CHECKING:
    from headwater.cache.jobs import JobRecord
    from headwater.cache.plan import MissReason
    from headwater.cache.sessions import SessionEntry


class RetentionMark(NamedTuple):
    """What an eviction policy remembers about a run."""

    used_s: float
    run_class: int
    uses: int = 1
    """Number of uses, including those before it was evicted and computed again."""


class Node:
    """Owned by `PrefixTree`. Only `TieredCache` and its parts change which blocks it has.

    A split makes a new node for the *head* and leaves this node as the tail. A reference to a
    node therefore always refers to the same last block, unless the node is `gone`.
    """

    __slots__ = (
        "children",
        "device",
        "device_children",
        "expected_until_s",
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
        "num_earlier_uses",
        "num_stored",
        "parent",
        "pins",
        "sessions",
        "start",
        "suspended_at",
        "tokens",
        "uid",
        "used",
        "wanted_s",
    )

    def __init__(self, parent: "Node | None", first: bytes, start: int, uid: int) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.first = first
        """The parent's key for this node: the bytes of its first block and of that block's
        media."""
        self.start = start
        """Blocks before this node on its path."""
        self.uid = uid
        self.num_blocks = 0
        self.tokens = b""
        """`num_blocks` blocks of int32. It may be followed by blocks that the node had before
        it was shortened."""
        self.lost: MissReason | None = None
        """Why the block that follows `num_blocks` in `tokens`, if there is one, was removed."""
        self.media: Mapping[int, bytes] | None = None
        self.namespace: Namespace = SHARED if parent is None else parent.namespace
        self.keys: list[BlockKey] | None = None
        """Block keys of the leading blocks, once they have been computed. They may be followed by
        keys of blocks that the node had before it was shortened. The list only grows, because
        events that were not published yet refer to it; it is replaced to drop keys."""
        self.device = self.host = EMPTY
        self.num_stored = 0
        self.device_children = self.host_children = 0
        """Children with blocks on the device, and on the host."""
        self.pins = 0
        """Leases and jobs whose path includes this node. A pin on a node is also on all of its
        ancestors."""
        self.jobs: tuple[JobRecord, ...] = ()
        """Jobs with a segment in this node. While there is one, the host blocks of the node
        are not evicted."""
        self.hits = self.num_earlier_uses = 0
        """Hits of this node, and uses of the node that was evicted from its place before, as far as
        ghosts remember."""
        self.suspended_at = -1
        """The value of `used` at which writing this node was suspended."""
        self.used = 0
        """Tick of the last release; orders nodes by age."""
        self.mark: RetentionMark | None = None
        """Set and read by eviction policies that mark runs, when the path is released."""
        self.sessions: set[SessionEntry] | None = None
        """Sessions whose last request ended with this node; None when there is none."""
        self.expected_until_s = 0.0
        """Time until which the client's hint expects the next request of a session; 0 without a
        hint, negative if the session is closed."""
        self.wanted_s = 0.0
        """When a waiting request was last found to need this node."""
        self.gone = False
        """Whether the node has left the tree, which is final. It keeps slots only while it is
        pinned."""

    @property
    def end(self) -> int:
        """Blocks up to and including this node on its path."""
        return self.start + self.num_blocks

    @property
    def num_uses(self) -> int:
        """How often the node was used, as far as this is known."""
        return self.num_earlier_uses + 1 + self.hits

    @property
    def num_both(self) -> int:
        """Blocks that are on the device and on the host."""
        return min(len(self.device), len(self.host))

    def covered(self) -> int:
        """Leading blocks that are in some tier."""
        return max(len(self.device), len(self.host), self.num_stored)


class NodeKeys:
    """The block keys of the nodes of one tree: computed when first needed, then remembered.

    A path that knows its keys, because another thread computed them, gives them to the nodes that
    are made from it.
    """

    def __init__(self, scheme: KeyScheme) -> None:
        self.scheme = scheme
        self.stride = scheme.block_tokens * 4
        """Bytes of the tokens of a block."""

    def keys(self, node: Node) -> list[BlockKey]:
        """The block keys of `node`, computed once and remembered; the list may be longer than
        the node."""
        known, num_blocks = node.keys, node.num_blocks
        if known is not None:
            start = len(known)
            if start >= num_blocks:
                return known
            # A sequence committed the next block of its output: most keys are computed here.
            if start == num_blocks - 1 and start and node.media is None:
                at = start * self.stride
                block = node.tokens[at : at + self.stride]
                known.append(BlockKey(next_key(known[-1], block)))
                return known
        return self._complete(node)

    def _complete(self, node: Node) -> list[BlockKey]:
        """Compute the keys of `node` and of the nodes before it, as far as they are missing."""
        missing = []
        at: Node | None = node
        while at is not None and (at.keys is None or len(at.keys) < at.num_blocks):
            missing.append(at)
            at = at.parent
        for late in reversed(missing):
            self._compute_keys(late)
        return node.keys or []

    def key_before(self, node: Node, block: int) -> BlockKey:
        """The key of the block before block `block` of `node`."""
        at = node if block else node.parent
        if at is None:
            raise InvariantError("no block is before a root")
        # A root has no blocks and one key: that of its namespace.
        return self.keys(at)[block - 1 if block else at.num_blocks - 1]

    def _compute_keys(self, node: Node) -> None:
        parent = node.parent
        if parent is None or not parent.keys:
            raise InvariantError("the keys of a node cannot be computed: its parent has none")
        keys = node.keys or []
        stride = self.stride
        run = memoryview(node.tokens)[len(keys) * stride : node.num_blocks * stride]
        media = node.media
        if media is not None and keys:
            media = shifted_media(media, len(keys), node.num_blocks - len(keys))
        before = keys[-1] if keys else parent.keys[parent.num_blocks - 1]
        computed = self.scheme.chain(before, run, media)
        node.keys = keys + computed if keys else computed


def shifted_media(
    media: Mapping[int, bytes], block: int, count: int
) -> dict[int, bytes] | None:
    """The entries of `media` for blocks [block, block + count), renumbered from 0."""
    return {i - block: m for i, m in media.items() if block <= i < block + count} or None
