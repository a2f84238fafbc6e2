"""Records which blocks the cache gains and loses, by tier, for subscribers of KV events.

Pure: records accumulate, in the order in which things happened, until they are taken. A record is
a tuple that refers to lists and bytes of its node and copies nothing; its event is built when it
is read, in the thread that publishes it. Without a subscriber there is no log, and no key is
computed for it.
"""

from collections.abc import Sequence
from typing import TypeAlias, overload

from headwater.cache.keys import SHARED, KeyScheme, Namespace
from headwater.cache.node import Node
from headwater.cache.tree import PrefixTree
from headwater.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from headwater.types import BlockKey, Tier

_Record: TypeAlias = tuple[
    Tier, list[BlockKey], int, int, BlockKey | None, bytes | None, Namespace
]
"""Blocks [start, end) of a node: tier, keys of the node, start, end, the key before the node, its
tokens, its namespace. Removed blocks have no tokens.

The list of keys is never shortened and its entries never change (see `Node.keys`), and the tokens
are immutable, so that the record stays true whatever happens to the node."""


class KVEventBatch(Sequence[CacheEvent]):
    """Events in order. They are built when they are first read, by one thread."""

    def __init__(
        self, records: list[_Record], scheme: KeyScheme, *, is_cleared: bool = False
    ) -> None:
        self._records = records
        self._scheme = scheme
        self._is_cleared = is_cleared
        """Whether nothing was cached before the first record."""
        self._events: list[CacheEvent] | None = None

    def __bool__(self) -> bool:
        return self._is_cleared or bool(self._records)

    def __len__(self) -> int:
        return len(self._built())

    @overload
    def __getitem__(self, at: int) -> CacheEvent: ...
    @overload
    def __getitem__(self, at: slice) -> list[CacheEvent]: ...
    def __getitem__(self, at: int | slice) -> CacheEvent | list[CacheEvent]:
        return self._built()[at]

    def _built(self) -> list[CacheEvent]:
        if self._events is None:
            self._events = [BlocksCleared()] if self._is_cleared else []
            for record in self._records:
                _append(self._events, record, self._scheme)
            self._records = []
        return self._events


class KVEventLog:
    """The changes since the last `take`, and a snapshot on request."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._records: list[_Record] = []
        self._is_cleared = False

    def stored(self, node: Node, tier: Tier, start: int, end: int) -> None:
        """Record that blocks [start, end) of `node` are in `tier` now."""
        if start < end:
            keys = node.keys
            if keys is None or len(keys) < end:
                keys = self._tree.keys(node)
            before = None if start or not node.start else self._tree.key_before(node, 0)
            self._records.append((tier, keys, start, end, before, node.tokens, node.namespace))

    def removed(self, node: Node, tier: Tier, start: int, end: int) -> None:
        """Record that blocks [start, end) of `node` have left `tier`. Their keys are known,
        because they were computed when the blocks were recorded as stored."""
        if start < end:
            keys = node.keys
            if keys is None or len(keys) < end:
                keys = self._tree.keys(node)
            self._records.append((tier, keys, start, end, None, None, SHARED))

    def cleared(self) -> None:
        """Record that nothing is cached any more, and drop the events that were not taken
        yet."""
        self._records, self._is_cleared = [], True

    def take(self) -> KVEventBatch:
        """The events since the last call, in order."""
        taken = KVEventBatch(self._records, self._tree.scheme, is_cleared=self._is_cleared)
        self._records, self._is_cleared = [], False
        return taken

    def snapshot(self) -> KVEventBatch:
        """Every block that is cached now, parents before children. O(nodes)."""
        log = KVEventLog(self._tree)
        for node in self._tree.nodes():
            lengths = (len(node.device), len(node.host), node.num_stored)
            for tier, count in zip(Tier, lengths, strict=True):
                log.stored(node, tier, 0, count)
        return log.take()


def _append(events: list[CacheEvent], record: _Record, scheme: KeyScheme) -> None:
    """Append the event of `record`; blocks removed from one tier in a row are one event."""
    tier, keys, start, end, _, tokens, _ = record
    if tokens is not None:
        events.append(_stored_event(record, scheme))
        return
    last = events[-1] if events else None
    if isinstance(last, BlocksRemoved) and last.tier is tier:
        last.keys.extend(keys[start:end])
    else:
        events.append(BlocksRemoved(tier=tier, keys=keys[start:end]))


def _stored_event(record: _Record, scheme: KeyScheme) -> BlocksStored:
    tier, keys, start, end, parent, tokens, namespace = record
    stride = scheme.block_tokens * 4
    if start:
        parent = keys[start - 1]
    event = BlocksStored(
        tier=tier,
        keys=keys[start:end],
        parent=parent,
        tokens=(tokens or b"")[start * stride : end * stride],
    )
    if namespace is not SHARED:
        event.adapter = namespace.adapter
        if namespace.salt:
            event.tokens = b""
            event.salt_id = scheme.root(namespace)[-8:].hex()
    return event
