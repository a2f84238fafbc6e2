"""Records which blocks arrive in host slots, so that another engine can find them again.

Pure: entries accumulate until they are taken. Without a reader there is no log, and no key is
computed for it.
"""

from dataclasses import dataclass
from typing import TypeAlias

from headwater.cache.keys import Namespace
from headwater.cache.node import Node
from headwater.cache.tree import PrefixTree
from headwater.types import BlockKey, Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class HostArrival:
    """The bytes of consecutive blocks are in host slots from now on, until the slots are
    written again."""

    namespace: Namespace
    parent: BlockKey
    """Key of the block before the first, or of the namespace."""

    keys: list[BlockKey]
    tokens: bytes
    """Tokens of all blocks, as little-endian int32."""

    slots: Slots


@dataclass(frozen=True, slots=True)
class HostCleared:
    """All host blocks were removed; a later engine may adopt none of those recorded before."""


HostChange: TypeAlias = HostArrival | HostCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedRun:
    """Consecutive blocks that an earlier engine left in host slots."""

    namespace: Namespace
    before: int | None
    """Index of the run directly before this one on its path; None for a run that begins a
    path."""

    tokens: bytes
    keys: list[BlockKey]
    slots: Slots
    used_s: float
    """Time of the last arrival of this run or of a run after it; decides the eviction order."""


class HostBlockLog:
    """The changes of the host tier since the last `take`."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._changes: list[HostChange] = []

    def arrived(self, node: Node, start: int, slots: Slots) -> None:
        """Record that blocks [start, start + len(slots)) of `node` are in host `slots`."""
        if node.media is not None:
            return  # a block with media cannot be described by its tokens
        end, stride = start + len(slots), self._tree.stride
        self._changes.append(
            HostArrival(
                namespace=node.namespace,
                parent=self._tree.key_before(node, start),
                keys=self._tree.keys(node)[start:end],
                tokens=node.tokens[start * stride : end * stride],
                slots=slots,
            )
        )

    def cleared(self) -> None:
        """Record that host blocks were removed on purpose; drop the changes that were not taken
        yet."""
        self._changes = [HostCleared()]

    def take(self) -> list[HostChange]:
        """The changes since the last call, in order."""
        taken, self._changes = self._changes, []
        return taken
