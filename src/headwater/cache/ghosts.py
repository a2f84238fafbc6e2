"""Ghosts: why evicted blocks are not here any more. Bounded; the oldest are forgotten first."""

from collections.abc import Sequence
from typing import TypeAlias

from headwater.cache.node import Node
from headwater.cache.plan import MissReason

Ghost: TypeAlias = tuple[MissReason, int]
"""Why a node left the tree, and its uid. A node created again at its place takes over the uid,
so that the ghosts of its children are still found."""

_Place: TypeAlias = tuple[int, int, bytes]


class Ghosts:
    """Ghosts by place: the parent node, the depth, and the first block.

    Namespaces have different roots, so only its own tenant can find a ghost. There are two
    generations of up to half of the limit each: the older one is forgotten in one step, and
    adding needs no ordering.
    """

    def __init__(self, max_ghosts: int) -> None:
        self._half = max_ghosts // 2
        self._young: dict[_Place, Ghost] = {}
        self._old: dict[_Place, Ghost] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, nodes: Sequence[Node], reason: MissReason) -> int:
        """Remember `nodes`, which were removed from the tree; return their number of blocks."""
        young, blocks = self._young, 0
        for node in nodes:
            young[node.parent.uid, node.start, node.first] = (reason, node.uid)  # type: ignore[union-attr]  # never a root
            blocks += node.num_blocks
        if len(young) > self._half:
            # A batch that alone exceeds the limit is forgotten at once.
            self._old = young if len(young) <= 2 * self._half else {}
            self._young = {}
        return blocks

    def find(self, parent: Node, depth: int, first: bytes) -> MissReason | None:
        """Why the block at this place was removed, if that is remembered."""
        place = (parent.uid, depth, first)
        ghost = self._young.get(place) or self._old.get(place)
        return None if ghost is None else ghost[0]

    def revive(self, parent: Node, depth: int, first: bytes) -> int | None:
        """Remove the ghost at this place and return its uid."""
        if not self._young and not self._old:
            return None
        place = (parent.uid, depth, first)
        ghost = self._young.pop(place, None) or self._old.pop(place, None)
        return None if ghost is None else ghost[1]

    def clear(self) -> None:
        """Forget all ghosts."""
        self._young.clear()
        self._old.clear()
