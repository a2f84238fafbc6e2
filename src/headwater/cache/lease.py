"""A pin on a path: its device blocks stay where they are until the lease is released."""

from headwater.cache.keys import Namespace, TokenPath
from headwater.cache.node import Node
from headwater.types import EMPTY, RequestId, Slots


class Lease:
    """Made and changed by `TieredCache` only; released once, by its owner or by expiry.

    A lease grows when its owner commits. It survives splits: it refers to the last node of
    its path, and a split leaves that node the tail.
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
        """Leading blocks of the owner's path that are settled: leased, or committed since."""
        self.namespace: Namespace = path.namespace
        self.path = path
        """The longest path its owner has shown: the prompt, later what was committed."""
        self.prompt_tokens = len(path.tokens)
        self.since = now
        self.expires_s = expires_s
        self.slots: Slots = EMPTY
        """Device slots of the blocks found when the lease was made, in position order."""
        self.pending: TokenPath | None = None
        """The path its owner has announced, while some of it is not committed."""
        self.place: tuple[Node, bytes] | None = None
        """Where that is known: the node it continues, and its next block."""
