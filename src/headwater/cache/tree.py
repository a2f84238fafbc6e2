"""The prefix tree: path-compressed and block-aligned. A walk costs nodes on a path, not blocks.

The tree compares tokens and media byte by byte, never hashes, so nothing can collide here. It
knows structure only: which node follows which. Its owner decides which blocks are in which tier.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from headwater.cache.keys import KeyScheme, Namespace, PathKeys, TokenPath
from headwater.cache.node import Node, NodeKeys, shifted_media
from headwater.cache.plan import MissReason
from headwater.errors import InvariantError
from headwater.types import BlockKey

_ROOTS_BEFORE_PRUNING = 4096


class PrefixTree(NodeKeys):
    """One root per namespace; a child is found by the bytes of its first block.

    Invariant: siblings differ in their first block; a node starts where its parent ends;
    only a root is empty. `check()` verifies it.
    """

    def __init__(self, scheme: KeyScheme) -> None:
        super().__init__(scheme)
        self.version = 0
        """Increases with every change of structure or residency. A match is current while it
        has the same value."""
        self.num_both = 0
        """Blocks that are on the device and on the host; updated by the parts that move
        blocks."""
        self.num_nodes = 0
        self.roots: dict[Namespace, Node] = {}
        # An OrderedDict, because finding the first key of a dict whose first entries were
        # deleted takes time proportional to the number of deletions.
        self.stored_only: OrderedDict[Node, None] = OrderedDict()
        """Nodes that are only in storage, oldest first. The evictor bounds their number."""
        self._next_uid = 0
        self._prune_at = _ROOTS_BEFORE_PRUNING

    def root(self, namespace: Namespace) -> Node:
        """The root of `namespace`; it is created if necessary."""
        root = self.roots.get(namespace)
        if root is None:
            if len(self.roots) >= self._prune_at:
                self._prune_roots()
            root = self.roots[namespace] = Node(None, b"", 0, self._new_uid())
            root.keys = [self.scheme.root(namespace)]
            root.namespace = namespace
        return root

    def _new_uid(self) -> int:
        """A number that no other node has had."""
        self._next_uid += 1
        return self._next_uid

    def walk(self, path: TokenPath, max_blocks: int) -> tuple[list[Node], int]:
        """The nodes of `path` below its root, and how many blocks match. Changes nothing.

        The last node may match only in part.
        """
        nodes: list[Node] = []
        node = self.roots.get(path.namespace)
        block = 0
        view, stride, plain = path.view, self.stride, path.media is None
        while node is not None and block < max_blocks:
            at = block * stride
            first = bytes(view[at : at + stride]) if plain else self.first(path, block)
            node = node.children.get(first)
            if node is None:
                break
            nodes.append(node)
            count = node.num_blocks
            # The usual case of `common`, repeated here because every request pays for the call.
            if (
                block + count <= max_blocks
                and plain
                and node.media is None
                and node.tokens.startswith(view[at : at + count * stride])
            ):
                block += count
                continue
            common = self.common(node, path, block, max_blocks)
            block += common
            if common < count:
                break
        return nodes, block

    def first(self, path: TokenPath, block: int) -> bytes:
        """The key of a node that starts with block `block` of `path`."""
        stride = self.stride
        first = bytes(path.view[block * stride : (block + 1) * stride])
        media = path.media
        return first if media is None else first + media.get(block, b"")

    def common(self, node: Node, path: TokenPath, block: int, max_blocks: int) -> int:
        """How many leading blocks of `node` equal the blocks of `path` from `block` on."""
        count = min(node.num_blocks, max_blocks - block)
        stride = self.stride
        run = path.view[block * stride : (block + count) * stride]
        # startswith is memcmp without a copy; comparing two memoryviews is 70 times slower.
        if not node.tokens.startswith(run):
            size = self.scheme.block_tokens
            mine = np.frombuffer(node.tokens, dtype=np.int32, count=count * size)
            theirs = path.tokens[block * size : (block + count) * size]
            # argmax of a boolean array is the index of the first difference, in tokens.
            count = int((mine != theirs).argmax()) // size
        if node.media is not None or path.media is not None:
            count = _common_media(node, path, block, count)
        return count

    def add_child(
        self, parent: Node, first: bytes, path: TokenPath, count: int, uid: int | None = None
    ) -> Node:
        """Create a child of `parent` for the next `count` blocks of `path`, found by `first`.

        `uid` is that of a node which was at the same place before.
        """
        block = parent.start + parent.num_blocks
        node = Node(parent, first, block, uid or self._new_uid())
        node.num_blocks = count
        if path.media is not None:
            node.media = shifted_media(path.media, block, count)
        if count == 1 and path.media is None:
            node.tokens = first
        else:
            node.tokens = self._bytes(path, block, count)
        if path.keys is not None:
            node.keys = path.keys.known_run(self.scheme, block, count)
        parent.children[first] = node
        self.num_nodes += 1
        self.version += 1
        return node

    def add_run(self, parent: Node, tokens: bytes, keys: list[BlockKey]) -> Node:
        """Create a child of `parent` for blocks that are known by their tokens and keys."""
        first = tokens[: self.stride]
        if first in parent.children:
            raise InvariantError("a run was added that is already in the tree")
        node = Node(parent, first, parent.end, self._new_uid())
        node.num_blocks, node.tokens, node.keys = len(keys), tokens, keys
        parent.children[first] = node
        self.num_nodes += 1
        self.version += 1
        return node

    def extend(self, node: Node, path: TokenPath, count: int) -> None:
        """Append blocks [node.end, node.end + count) of `path` to a leaf."""
        stride, num_blocks = self.stride, node.num_blocks
        end = node.start + num_blocks
        if path.media is not None or node.media is not None:
            added = shifted_media(path.media or {}, end, count) or {}
            kept = shifted_media(node.media or {}, 0, num_blocks) or {}
            node.media = {**kept, **{i + num_blocks: m for i, m in added.items()}} or None
        if node.keys:
            if len(node.keys) > num_blocks:
                node.keys = node.keys[:num_blocks]
            if path.keys is not None and len(node.keys) == num_blocks:
                node.keys += path.keys.known_run(self.scheme, end, count) or []
        tokens = node.tokens[: num_blocks * stride]
        node.tokens = tokens + path.view[end * stride : (end + count) * stride]
        node.num_blocks = num_blocks + count
        node.lost = None
        self.version += 1

    def path_to(self, node: Node, namespace: Namespace) -> TokenPath:
        """The path that ends with `node`, which is in the tree."""
        at, runs, media = node, [], {}
        while at.parent is not None:
            runs.append(at.tokens[: at.num_blocks * self.stride])
            media.update({at.start + i: m for i, m in (at.media or {}).items()})
            at = at.parent
        tokens = np.frombuffer(b"".join(reversed(runs)), dtype=np.int32)
        return TokenPath(tokens, namespace, media)

    def split(self, node: Node, at: int) -> Node:
        """Divide `node` before its block `at`; return the new head.

            before:  parent --> node [0 ........ num_blocks)
            after:   parent --> head [0 .. at) --> node [at .. num_blocks)

        `node` stays the tail, so that leases, jobs and sessions that end with it need no
        change. The head gets a copy of what holds for a whole path (pins, hits, age); slots
        and jobs are divided.
        """
        if not 0 < at < node.num_blocks:
            raise InvariantError(
                f"cannot split a node of {node.num_blocks} blocks before block {at}"
            )
        parent = node.parent
        if parent is None or parent.children.get(node.first) is not node:
            raise InvariantError("a node that is not in the tree cannot be split")
        head = Node(parent, node.first, node.start, self._new_uid())
        parent.children[node.first] = head
        self._divide(head, node, at)
        node.parent = head
        head.children[node.first] = node
        head.pins, head.hits, head.used = node.pins, node.hits, node.used
        head.num_earlier_uses, head.wanted_s = node.num_earlier_uses, node.wanted_s
        head.mark, head.expected_until_s = node.mark, node.expected_until_s
        self.num_nodes += 1
        self.version += 1
        return head

    def shorten(self, node: Node, count: int, reason: MissReason) -> None:
        """Forget all but the first `count` blocks of a node that has no children.

        The tokens of the first forgotten block are kept with the reason, to explain a miss.
        """
        if node.children:
            raise InvariantError("a node with children was shortened")
        node.num_blocks = count
        node.lost = reason
        # Copying the buffer each time would make removing block by block quadratic. One block
        # more than `count` is kept: that is the block that `lost` explains.
        if len(node.tokens) > 2 * (count + 1) * self.stride:
            node.tokens = node.tokens[: (count + 1) * self.stride]
        self.version += 1

    def lost_after(self, node: Node, first: bytes) -> MissReason | None:
        """Why the block `first` was removed, if it was the next block of `node`."""
        if node.lost is None:
            return None
        at = node.num_blocks
        was = node.tokens[at * self.stride : (at + 1) * self.stride]
        if node.media is not None:
            was += node.media.get(at, b"")
        return node.lost if was == first else None

    def remove(self, node: Node) -> None:
        """Take `node` out of the tree. It is `gone` afterwards."""
        if node.parent is None or node.parent.children.pop(node.first, None) is not node:
            raise InvariantError("a node that is not in the tree cannot be removed")
        node.gone = True
        self.stored_only.pop(node, None)
        self.forget((node,))

    def forget(self, nodes: Sequence[Node]) -> None:
        """Release the memory of nodes that were taken out of the tree, children first.

        Leases, jobs and stale entries of policies may still refer to a node, so its content is
        dropped here. Sessions that ended with a node end with its parent from now on.
        """
        for node in nodes:
            node.tokens = b""
            node.keys = node.media = None
            if node.sessions is not None:
                _move_sessions(node, node.parent)
        self.num_nodes -= len(nodes)
        self.version += 1

    def clear(self) -> None:
        """Empty the tree.

        Parents and children refer to each other. The links to children are removed, so that
        nodes are freed at once and not by a later run of the garbage collector. Links to
        parents stay: a lease that outlives the tree releases its pins along them.
        """
        for node in [*self.nodes(), *self.roots.values()]:
            node.gone = True
            node.children = {}
            node.tokens = b""
            node.keys = node.media = node.sessions = None
        self.roots.clear()
        self.stored_only.clear()
        self.num_nodes = 0
        self.version += 1

    def recall_keys(self, path: TokenPath, num_blocks: int) -> int:
        """Let `path` remember the keys that cached blocks have; computes none. Returns the
        number of leading blocks whose keys are known."""
        remembered = path.keys = path.keys or PathKeys()
        if len(remembered.known(self.scheme)) >= num_blocks:
            return num_blocks
        nodes, found = self.walk(path, num_blocks)
        keys: list[BlockKey] = []
        for node in nodes:
            known = node.keys or []
            keys += known[: node.num_blocks]
            if len(known) < node.num_blocks:
                break
        remembered.remember(self.scheme, keys[:found])
        return len(remembered.known(self.scheme))

    def nodes(self) -> Iterator[Node]:
        """Every node except the roots, parents first."""
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                yield from subtree(child)

    def check(self) -> None:
        """Raise InvariantError if the structure is wrong. O(nodes)."""
        count = 0
        for node in self.nodes():
            count += 1
            _check_node(node, self.stride)
        if count != self.num_nodes:
            raise InvariantError(f"{count} nodes in the tree, {self.num_nodes} counted")

    def _bytes(self, path: TokenPath, block: int, count: int) -> bytes:
        stride = self.stride
        return bytes(path.view[block * stride : (block + count) * stride])

    def _divide(self, head: Node, tail: Node, at: int) -> None:
        """Move the first `at` blocks of `tail`, and everything known about them, to `head`."""
        stride = self.stride
        cut = at * stride
        head.num_blocks = at
        # A head with at least half of the blocks keeps the whole buffer: that saves a copy and
        # wastes at most half. Bytes after `num_blocks` are ignored.
        head.tokens = tail.tokens if 2 * at >= tail.num_blocks else tail.tokens[:cut]
        tail.tokens = tail.tokens[cut : tail.num_blocks * stride]
        head.device, tail.device = tail.device[:at], tail.device[at:]
        head.host, tail.host = tail.host[:at], tail.host[at:]
        # Each tier has a leading part of the run, so the head gets its blocks first.
        head.num_stored = min(at, tail.num_stored)
        tail.num_stored -= head.num_stored
        if tail.keys is not None:
            head.keys, tail.keys = tail.keys[:at], tail.keys[at : tail.num_blocks]
        if tail.media is not None:
            whole = tail.media
            head.media = shifted_media(whole, 0, at)
            tail.media = shifted_media(whole, at, tail.num_blocks - at)
        tail.lost = None
        tail.start += at
        tail.num_blocks -= at
        tail.first = tail.tokens[:stride]
        if tail.media is not None:
            tail.first += tail.media.get(0, b"")
        head.device_children = int(len(tail.device) > 0)
        head.host_children = int(len(tail.host) > 0)
        for half in (head, tail):
            if not len(half.device) and not len(half.host):
                self.stored_only[half] = None  # a node that is in it already keeps its position
        for job in tail.jobs:
            job.divide(head, tail, at)

    def _prune_roots(self) -> None:
        """Forget namespaces without blocks and without leases."""
        for namespace in [n for n, r in self.roots.items() if not r.children and not r.pins]:
            del self.roots[namespace]
        self._prune_at = max(_ROOTS_BEFORE_PRUNING, 2 * len(self.roots))


def subtree(node: Node) -> Iterator[Node]:
    """`node` and everything below it, parents first."""
    pending = [node]
    while pending:
        at = pending.pop()
        pending.extend(at.children.values())
        yield at


def _move_sessions(node: Node, parent: Node | None) -> None:
    """Let the sessions that end with `node` end with its parent."""
    moved, node.sessions = node.sessions, None
    if moved and parent is not None:
        for session in moved:
            session.node = parent
        parent.sessions = moved if parent.sessions is None else parent.sessions | moved


def _common_media(node: Node, path: TokenPath, block: int, count: int) -> int:
    """The index of the first of `count` blocks whose media differ, or `count`."""
    mine, theirs = node.media or {}, path.media or {}
    blocks = {i for i in mine if i < count}
    blocks |= {i - block for i in theirs if 0 <= i - block < count}
    return min((i for i in blocks if mine.get(i) != theirs.get(i + block)), default=count)


def _check_node(node: Node, stride: int) -> None:
    parent = node.parent
    if parent is None or parent.children.get(node.first) is not node:
        raise InvariantError("a node is not among the children of its parent")
    if node.gone:
        raise InvariantError("a node marked as gone is in the tree")
    if node.start != parent.end:
        raise InvariantError("a node does not start where its parent ends")
    if node.num_blocks < 1 or len(node.tokens) < node.num_blocks * stride:
        raise InvariantError("a node has no blocks, or too few tokens")
    if not node.first.startswith(node.tokens[:stride]):
        raise InvariantError("a node is filed under tokens that are not its first block")
