"""The shape of the prefix tree, for a picture: how many blocks are where, never their content.

Tokens and keys are not included. Of salted namespaces (separate tenants) only totals are
included. The cost is bounded by `max_nodes`, however large the tree is.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice

from headwater.cache.keys import SHARED
from headwater.cache.node import Node
from headwater.cache.tree import PrefixTree, subtree

_LEAST_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineNode:
    """One run of blocks."""

    uid: int
    parent: int | None
    """None for the first run of a prompt."""

    start: int
    """Number of blocks before this run on its path."""

    num_blocks: int
    device: int
    """Leading blocks on the device; the next two fields are the same for host and storage."""

    host: int
    stored: int
    age: int
    """Requests that ended since the last one that used the node; 0 while it is in use."""

    num_pins: int
    num_children: int
    """All children, including those that are not in the outline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaltedBlocks:
    """Totals of all salted tenants together."""

    num_namespaces: int
    device: int
    host: int
    stored: int
    is_whole: bool
    """False if there were more blocks than could be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Nodes, parents before children; of many siblings the newest ones."""

    nodes: list[OutlineNode]
    num_nodes: int
    """Nodes in the whole tree, including those that are not shown."""

    num_first: int
    """Nodes without a parent, including those that are not shown."""

    apart: SaltedBlocks
    generation: int


def outline(
    tree: PrefixTree, *, tick: int, generation: int, max_depth: int, max_nodes: int
) -> Outline:
    """The shared part of `tree` down to `max_depth` nodes, breadth first."""
    root = tree.roots.get(SHARED)
    return Outline(
        nodes=[] if root is None else _shared_nodes(root, tick, max_depth, max_nodes),
        num_nodes=tree.num_nodes,
        num_first=0 if root is None else len(root.children),
        apart=_apart(tree, max_nodes),
        generation=generation,
    )


def _shared_nodes(root: Node, tick: int, max_depth: int, max_nodes: int) -> list[OutlineNode]:
    shown: list[OutlineNode] = []
    width = max(_LEAST_WIDTH, max_nodes // 8)
    pending = deque([(root, 0)])
    while pending and len(shown) < max_nodes:
        node, depth = pending.popleft()
        if depth == max_depth:
            continue
        room = min(width, max_nodes - len(shown))
        # Takes the newest without reading the others, however many there are.
        for child in islice(reversed(node.children.values()), room):
            shown.append(_shown(child, None if node is root else node.uid, tick))
            pending.append((child, depth + 1))
    return shown


def _shown(node: Node, parent: int | None, tick: int) -> OutlineNode:
    return OutlineNode(
        uid=node.uid,
        parent=parent,
        start=node.start,
        num_blocks=node.num_blocks,
        device=len(node.device),
        host=len(node.host),
        stored=node.num_stored,
        age=0 if node.pins else tick - node.used,
        num_pins=node.pins,
        num_children=len(node.children),
    )


def _apart(tree: PrefixTree, max_nodes: int) -> SaltedBlocks:
    roots = [root for name, root in tree.roots.items() if name != SHARED and root.children]
    everything = (
        node for root in roots for child in root.children.values() for node in subtree(child)
    )
    device = host = stored = 0
    for node in islice(everything, max_nodes):
        device += len(node.device)
        host += len(node.host)
        stored += node.num_stored
    return SaltedBlocks(
        num_namespaces=len(roots),
        device=device,
        host=host,
        stored=stored,
        is_whole=next(everything, None) is None,
    )
