"""The prefix tree: path-compressed, block-aligned. Cost is in nodes on a path, not in blocks.

Local tiers compare tokens and media themselves, byte by byte, so nothing can collide here.
The tree knows structure only: which node follows which. Residency is its owner's business.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from headwater.cache.keys import KeyScheme, Namespace, TokenPath
from headwater.cache.node import Node
from headwater.cache.plan import MissReason
from headwater.errors import InvariantError
from headwater.types import BlockKey

_ROOTS_BEFORE_PRUNING = 4096


class PrefixTree:
    """One root a namespace; a child is found by the bytes of its first block.

    Invariant: siblings differ in their first block; a node starts where its parent ends;
    no node but a root is empty. `check()` verifies it.
    """

    def __init__(self, scheme: KeyScheme) -> None:
        self.scheme = scheme
        self.version = 0
        """Counts changes of structure: an answer is current while this stands still."""
        self.num_nodes = 0
        self.roots: dict[Namespace, Node] = {}
        self.stored_only: dict[Node, None] = {}
        """Nodes that neither the device nor the host has, oldest first; bounded by the evictor."""
        self.stride = scheme.block_tokens * 4
        self._next_uid = 0
        self._prune_at = _ROOTS_BEFORE_PRUNING

    def root(self, namespace: Namespace) -> Node:
        """The root of `namespace`, made when there is none yet."""
        root = self.roots.get(namespace)
        if root is None:
            if len(self.roots) >= self._prune_at:
                self._prune_roots()
            root = self.roots[namespace] = Node(None, b"", 0, self.new_uid())
            root.keys = [self.scheme.root(namespace)]
            root.namespace = namespace
        return root

    def new_uid(self) -> int:
        """A number no other node has had."""
        self._next_uid += 1
        return self._next_uid

    def walk(self, path: TokenPath, max_blocks: int) -> tuple[list[Node], int]:
        """The nodes that `path` goes through below its root, and how many blocks match.

        The last node may match only in part. Changes nothing.
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
            # The usual case of `common`, here once more because every request pays for it.
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
        """What a node that starts with block `block` of `path` is found by."""
        stride = self.stride
        first = bytes(path.view[block * stride : (block + 1) * stride])
        media = path.media
        return first if media is None else first + media.get(block, b"")

    def common(self, node: Node, path: TokenPath, block: int, max_blocks: int) -> int:
        """How many leading blocks of `node` are the blocks of `path` from `block` on."""
        count = min(node.num_blocks, max_blocks - block)
        stride = self.stride
        run = path.view[block * stride : (block + count) * stride]
        # startswith is memcmp without a copy; comparing two memoryviews is 70 times slower.
        if not node.tokens.startswith(run):
            size = self.scheme.block_tokens
            mine = np.frombuffer(node.tokens, dtype=np.int32, count=count * size)
            theirs = path.tokens[block * size : (block + count) * size]
            count = int((mine != theirs).argmax()) // size
        if node.media is not None or path.media is not None:
            count = _common_media(node, path, block, count)
        return count

    def graft(self, parent: Node, first: bytes, path: TokenPath, count: int, uid: int) -> Node:
        """A new child of `parent` for the next `count` blocks of `path`, from `first` on."""
        block = parent.end
        node = Node(parent, first, block, uid)
        node.num_blocks = count
        alone = count == 1 and path.media is None
        node.tokens = first if alone else self._bytes(path, block, count)
        if path.media is not None:
            node.media = _shifted(path.media, block, count)
        parent.children[first] = node
        self.num_nodes += 1
        self.version += 1
        return node

    def extend(self, node: Node, path: TokenPath, count: int) -> None:
        """Append blocks [node.end, node.end + count) of `path` to the run of a leaf."""
        stride = self.stride
        tokens = node.tokens[: node.num_blocks * stride]
        if path.media is not None or node.media is not None:
            added = _shifted(path.media or {}, node.end, count) or {}
            kept = _shifted(node.media or {}, 0, node.num_blocks) or {}
            node.media = {**kept, **{i + node.num_blocks: m for i, m in added.items()}} or None
        node.tokens = tokens + self._bytes(path, node.end, count)
        node.num_blocks += count
        node.lost = None
        self.version += 1

    def path_to(self, node: Node, namespace: Namespace) -> TokenPath:
        """The path that ends with `node`, or with what of it is still in the tree."""
        at, runs, media = node, [], {}
        while at.parent is not None:
            if not at.gone:
                runs.append(at.tokens[: at.num_blocks * self.stride])
                media.update({at.start + i: m for i, m in (at.media or {}).items()})
            at = at.parent
        tokens = np.frombuffer(b"".join(reversed(runs)), dtype=np.int32)
        return TokenPath(tokens, namespace, media)

    def split(self, node: Node, at: int) -> Node:
        """Cut the run of `node` before block `at`; return the new head.

        The head gets a copy of everything that holds for a whole path (pins, hits, age);
        slots and jobs are divided. `node` stays the tail.
        """
        if not 0 < at < node.num_blocks:
            raise InvariantError(f"cannot split {node.num_blocks} blocks at {at}")
        parent = node.parent
        if parent is None or parent.children.get(node.first) is not node:
            raise InvariantError("a node that is not in the tree cannot be split")
        head = Node(parent, node.first, node.start, self.new_uid())
        parent.children[node.first] = head
        self._divide(head, node, at)
        node.parent = head
        head.children[node.first] = node
        head.pins, head.hits, head.used = node.pins, node.hits, node.used
        head.mark = node.mark
        self.num_nodes += 1
        self.version += 1
        return head

    def shorten(self, node: Node, count: int, reason: MissReason) -> None:
        """Forget all but the first `count` blocks of a run that has no children.

        The tokens of the first block that is forgotten are kept, with the reason.
        """
        if node.children:
            raise InvariantError("a node with children was shortened")
        node.num_blocks = count
        node.lost = reason
        if node.keys:
            del node.keys[count:]
        # Cutting the buffer each time would make trimming block by block quadratic.
        if len(node.tokens) > 2 * (count + 1) * self.stride:
            node.tokens = node.tokens[: (count + 1) * self.stride]
        self.version += 1

    def lost_after(self, node: Node, first: bytes) -> MissReason | None:
        """Why block `first` is not here any more, if it was the next of the run of `node`."""
        if node.lost is None:
            return None
        at = node.num_blocks
        was = node.tokens[at * self.stride : (at + 1) * self.stride]
        if node.media is not None:
            was += node.media.get(at, b"")
        return node.lost if was == first else None

    def cut(self, node: Node) -> None:
        """Take `node` out of the tree. It is `gone` from here on."""
        if node.parent is None or node.parent.children.pop(node.first, None) is not node:
            raise InvariantError("a node that is not in the tree cannot be taken out")
        node.gone = True
        self.count_cut(1)

    def count_cut(self, count: int) -> None:
        """`count` nodes were taken out of the tree."""
        self.num_nodes -= count
        self.version += 1

    def clear(self) -> None:
        """Let go of everything; whoever has marked the nodes gone still has them."""
        self.roots.clear()
        self.stored_only.clear()
        self.num_nodes = 0
        self.version += 1

    def keys(self, node: Node) -> list[BlockKey]:
        """The content keys of the run of `node`, computed once and remembered."""
        missing = []
        at: Node | None = node
        while at is not None and (at.keys is None or len(at.keys) < at.num_blocks):
            missing.append(at)
            at = at.parent
        for late in reversed(missing):
            self._compute_keys(late)
        return node.keys or []

    def key_before(self, node: Node, block: int) -> BlockKey:
        """The key that the key of block `block` of `node` is chained to."""
        keys = self.keys(node)
        return keys[block - 1] if block else node.parent.keys[-1]  # type: ignore[union-attr,index]  # not a root

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                yield from subtree(child)

    def check(self) -> None:
        """Raise InvariantError if the structure is broken. O(nodes)."""
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
        """Move the first `at` blocks of `tail`, with all that is known of them, to `head`."""
        stride = self.stride
        cut = at * stride
        head.num_blocks = at
        # A long head keeps the buffer it shares with the tail: no copy, and little too much.
        head.tokens = tail.tokens if 2 * at >= tail.num_blocks else tail.tokens[:cut]
        tail.tokens = tail.tokens[cut : tail.num_blocks * stride]
        head.device, tail.device = tail.device[:at], tail.device[at:]
        head.host, tail.host = tail.host[:at], tail.host[at:]
        head.num_stored = min(at, tail.num_stored)
        tail.num_stored -= head.num_stored
        if tail.keys is not None:
            head.keys, tail.keys = tail.keys[:at], tail.keys[at:]
        if tail.media is not None:
            whole = tail.media
            head.media = _shifted(whole, 0, at)
            tail.media = _shifted(whole, at, tail.num_blocks - at)
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
                self.stored_only[half] = None
        for job in tail.jobs:
            job.divide(head, tail, at)

    def _compute_keys(self, node: Node) -> None:
        parent = node.parent
        if parent is None or not parent.keys:
            raise InvariantError("a node has no parent to chain its keys to")
        keys = node.keys or []
        stride = self.stride
        run = memoryview(node.tokens)[len(keys) * stride : node.num_blocks * stride]
        media = node.media
        if media is not None and keys:
            media = _shifted(media, len(keys), node.num_blocks - len(keys))
        node.keys = keys + self.scheme.chain(keys[-1] if keys else parent.keys[-1], run, media)

    def _prune_roots(self) -> None:
        """Forget namespaces that have nothing and nobody."""
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


def _shifted(media: Mapping[int, bytes], block: int, count: int) -> dict[int, bytes] | None:
    """The entries of `media` for blocks [block, block + count), counted from `block`."""
    return {i - block: m for i, m in media.items() if block <= i < block + count} or None


def _common_media(node: Node, path: TokenPath, block: int, count: int) -> int:
    """The first of `count` blocks whose media differ, or `count`."""
    mine, theirs = node.media or {}, path.media or {}
    blocks = {i for i in mine if i < count}
    blocks |= {i - block for i in theirs if 0 <= i - block < count}
    return min((i for i in blocks if mine.get(i) != theirs.get(i + block)), default=count)


def _check_node(node: Node, stride: int) -> None:
    parent = node.parent
    if parent is None or parent.children.get(node.first) is not node:
        raise InvariantError("a child's parent does not know it")
    if node.gone:
        raise InvariantError("a node that is gone is in the tree")
    if node.start != parent.end:
        raise InvariantError("a node does not start where its parent ends")
    if node.num_blocks < 1 or len(node.tokens) < node.num_blocks * stride:
        raise InvariantError("a node has no blocks, or no tokens for them")
    if not node.first.startswith(node.tokens[:stride]):
        raise InvariantError("a node is found by another block than its first")
