"""Why blocks that were here are not here any more. Bounded; oldest forgotten first."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from headwater.cache.node import Node
from headwater.cache.plan import MissReason

Ghost: TypeAlias = tuple[MissReason, int]
"""Why a run left the tree, and the uid of the node it was. A node made again in its place
takes the uid over, so that ghosts further down are still found."""


class Ghosts:
    """Ghosts by place: the node they followed, the depth, and their first block.

    Namespaces have different roots, so a ghost is only ever found by its own tenant.
    """

    def __init__(self, max_ghosts: int) -> None:
        self._max = max_ghosts
        self._by_place: OrderedDict[tuple[int, int, bytes], Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_place)

    def add(self, parent: Node, depth: int, first: bytes, ghost: Ghost) -> None:
        """Remember that the run at this place is gone."""
        self._by_place[parent.uid, depth, first] = ghost
        self._bound()

    def add_nodes(self, nodes: Sequence[Node], reason: MissReason) -> None:
        """Remember that `nodes` were taken out of the tree, parents after their children."""
        ghosts = self._by_place
        for node in nodes:
            ghosts[node.parent.uid, node.start, node.first] = (reason, node.uid)  # type: ignore[union-attr]  # never a root
        self._bound()

    def find(self, parent: Node, depth: int, first: bytes) -> Ghost | None:
        """The ghost at this place."""
        return self._by_place.get((parent.uid, depth, first))

    def revive(self, parent: Node, depth: int, first: bytes) -> int | None:
        """The uid of the ghost at this place, which is a ghost no longer."""
        ghost = self._by_place.pop((parent.uid, depth, first), None)
        return None if ghost is None else ghost[1]

    def clear(self) -> None:
        """Forget all."""
        self._by_place.clear()

    def _bound(self) -> None:
        while len(self._by_place) > self._max:
            self._by_place.popitem(last=False)
