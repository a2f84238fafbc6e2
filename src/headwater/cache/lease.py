"""A lease: a pin on a path with an owner. Its device blocks stay until it is released."""

from headwater.cache.keys import Namespace, TokenPath
from headwater.cache.node import Node
from headwater.types import EMPTY, RequestId, Slots


class Lease:
    """Created and changed by `TieredCache` only; released once, by its owner or by expiry.

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
        """The longest path known of its owner: the prompt, later what was committed."""
        self.prompt_tokens = len(path.tokens)
        self.since = now
        self.expires_s = expires_s
        self.slots: Slots = EMPTY
        """Device slots of the blocks found when the lease was created, in token order."""
        self.pending: TokenPath | None = None
        """The path that its owner announced, while part of it is not committed."""
        self.place: tuple[Node, bytes] | None = None
        """Key of the announcement: the node it continues, and its next block."""
