"""Why blocks that were here are not here any more. Bounded; the oldest are forgotten first."""

from collections.abc import Sequence
from typing import TypeAlias

from headwater.cache.node import Node
from headwater.cache.plan import MissReason

Ghost: TypeAlias = tuple[MissReason, int]
"""Why a node left the tree, and its uid. A node made again in its place takes the uid over,
so that ghosts further down are still found."""

_Place: TypeAlias = tuple[int, int, bytes]


class Ghosts:
    """Ghosts by place: the node they followed, the depth, and their first block.

    Namespaces have different roots, so a ghost is only ever found by its own tenant. Kept in
    two generations, each up to half of the limit: forgetting the older one is one step, and
    adding needs no order.
    """

    def __init__(self, max_ghosts: int) -> None:
        self._half = max_ghosts // 2
        self._young: dict[_Place, Ghost] = {}
        self._old: dict[_Place, Ghost] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, nodes: Sequence[Node], reason: MissReason) -> int:
        """Remember `nodes`, which were taken out of the tree; how many blocks that were."""
        young, blocks = self._young, 0
        for node in nodes:
            young[node.parent.uid, node.start, node.first] = (reason, node.uid)  # type: ignore[union-attr]  # never a root
            blocks += node.num_blocks
        if len(young) > self._half:
            # A batch larger than half of the limit is forgotten at once.
            self._old = young if len(young) <= 2 * self._half else {}
            self._young = {}
        return blocks

    def find(self, parent: Node, depth: int, first: bytes) -> MissReason | None:
        """Why the block at this place is gone, if it is remembered."""
        place = (parent.uid, depth, first)
        ghost = self._young.get(place) or self._old.get(place)
        return None if ghost is None else ghost[0]

    def revive(self, parent: Node, depth: int, first: bytes) -> int | None:
        """The uid of the ghost at this place, which is a ghost no longer."""
        if not self._young and not self._old:
            return None
        place = (parent.uid, depth, first)
        ghost = self._young.pop(place, None) or self._old.pop(place, None)
        return None if ghost is None else ghost[1]

    def clear(self) -> None:
        """Forget all."""
        self._young.clear()
        self._old.clear()
