"""Headwater's `session` retention as the eviction policy of vLLM's CPU tier.

    "eviction_policy": "SessionCachePolicy",
    "cache_policy_module_path": "headwater.plugins.vllm.policy"

vLLM's chunks are nodes of one block each. A request's chunks become a path when it finishes; until
then a chunk is a node without a parent. The order of eviction is the one of Headwater's own tree:
least hit density first, and no chunk before those that follow it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from headwater.cache.node import Node
from headwater.cache.plan import Lease
from headwater.cache.policy import (
    EvictionPolicy,
    FinishedRequest,
    MarkedRun,
    Shape,
    make_orders,
)
from headwater.clock import Clock, SystemClock
from headwater.plugins.identity import key_path
from headwater.plugins.versions import require_tested
from headwater.plugins.vllm.paths import group_of, group_paths, positions
from headwater.types import EMPTY, BlockKey, RequestId

_PRESENT = np.zeros(1, dtype=np.int64)
"""Placeholder for the device slots of a node whose chunk is in the tier: one slot, whose number
only vLLM knows."""

_DEFAULT_CHUNK_TOKENS = 16
_KEY_BYTES = 32


class _Entry(NamedTuple):
    status: ChunkStatus
    node: Node


@dataclass(slots=True)
class _PromptEnd:
    """Length of a request's prompt: the tokens that had keys when its first chunks were
    stored."""

    tokens: int


class SessionCachePolicy(CachePolicy):
    """Learns which prefixes are used again, and evicts first those with the lowest hit
    density."""

    clock: ClassVar[Clock] = SystemClock()
    """The clock for ages; a simulation has its own."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        require_tested("vllm")
        self.clear()

    def clear(self) -> None:
        self._entries: dict[OffloadKey, _Entry] = {}
        self._order: EvictionPolicy | None = None
        self._unordered: dict[Node, None] = {}
        """Nodes that may be evicted but have no place in the order yet, because their request
        has not finished. When it finishes, they get their marks and places together."""
        self._chunk_tokens = 0
        self._last = 0

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.status

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._last += 1
        node = Node(None, key, 0, self._last)
        node.num_blocks = 1
        node.device = _PRESENT
        self._entries[key] = _Entry(chunk, node)
        if chunk.ref_cnt == 0:
            self._unordered[node] = None

    def remove(self, key: OffloadKey) -> None:
        node = self._entries.pop(key).node
        self._leave_tier(node)
        if self._unordered.pop(node, self) is self and node in self._evictable:
            self._evictable.discard_all([node])
        self._unlink(node)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Nothing to do: uses count when their request finishes."""

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        if req_context.get_state(_PromptEnd) is None:
            ends = positions(req_context).values()
            req_context.set_state(_PromptEnd(max(ends, default=0)))
            if not self._chunk_tokens:
                self._chunk_tokens = min(ends, default=0)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        now = self.clock.now()
        paths = _paths(key_groups, req_context)
        if not paths:
            return
        longest = max(paths, key=len)
        runs = self._visit(longest, req_context, now)
        for path in paths:
            present = [
                (place, entry.node)
                for place, key in enumerate(path)
                if (entry := self._entries.get(key)) is not None
            ]
            self._link([node for _, node in present])
            self._mark(present, runs, len(longest) / len(path))
            self._order_again([node for _, node in present], now)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        self._order_all()
        chosen: list[Node] = []
        candidates = self._victims()
        while len(chosen) < n and (node := next(candidates, None)) is not None:
            if node.first not in protected:
                self._leave_tier(node)
                chosen.append(node)
        if len(chosen) < n:
            for node in chosen:
                self._enter_tier(node)
        del candidates  # closing the iterator puts back nodes that it took but did not return
        if len(chosen) < n:
            return None
        self._evictable.discard_all(chosen)
        evicted = []
        for node in chosen:
            key = OffloadKey(node.first)
            evicted.append((key, self._entries.pop(key).status))
            self._unlink(node)
        return evicted

    def mark_evictable(self, key: OffloadKey) -> None:
        self._unordered[self._entries[key].node] = None

    def mark_non_evictable(self, key: OffloadKey) -> None:
        node = self._entries[key].node
        if node in self._unordered:
            del self._unordered[node]
        else:
            self._evictable.discard(node)

    @property
    def _evictable(self) -> EvictionPolicy:
        """The order of eviction. It is created at first use, with a default if the number of
        tokens in a chunk is not known by then."""
        if self._order is None:
            self._chunk_tokens = self._chunk_tokens or _DEFAULT_CHUNK_TOKENS
            shape = Shape(self.cache_capacity, 0, self._chunk_tokens)
            self._order = make_orders("session", shape).device
        return self._order

    def _victims(self) -> Iterator[Node]:
        """The nodes in the order of eviction, each only when those that follow it have left."""
        passed: set[Node] = set()
        for node in self._evictable.victims():
            at: Node | None = node if len(node.device) else None
            while at is not None and not at.device_children:
                yield at
                at = at.parent if at.parent in passed else None
            if node.device_children:
                passed.add(node)

    def _visit(
        self, path: Sequence[OffloadKey], req_context: ReqContext, now: float
    ) -> Sequence[MarkedRun]:
        """Tell the policy about a finished request; return the runs of its path, with their
        marks."""
        size = self._chunk_tokens or _DEFAULT_CHUNK_TOKENS
        ends = positions(req_context)
        end = ends.get(path[-1], len(path) * size)
        known = req_context.get_state(_PromptEnd)
        prompt_tokens = end if known is None else known.tokens
        output_tokens = max(max(ends.values(), default=0) - prompt_tokens, 0)
        tokens = key_path([BlockKey(key[:_KEY_BYTES].ljust(_KEY_BYTES)) for key in path], size)
        lease = Lease(RequestId(""), Node(None, b"", 0, 0), len(path), tokens, now, None)
        lease.prompt_tokens -= max(end - prompt_tokens, 0)
        finished = FinishedRequest(prompt_tokens, output_tokens)
        return self._evictable.visit(lease, finished, now)

    def _mark(
        self, present: list[tuple[int, Node]], runs: Sequence[MarkedRun], scale: float
    ) -> None:
        """Give each node the mark of its run. The ends of `runs` are positions in the longest
        path of the request, which has `scale` times as many blocks as the path of the nodes."""
        ends = [run.end for run in runs]
        for place, node in present:
            at = bisect_right(ends, int(place * scale))
            if at < len(runs):
                node.mark = runs[at].mark

    def _order_again(self, nodes: list[Node], now: float) -> None:
        """Move those of `nodes` that may be evicted to the places of their new marks."""
        order, unordered = self._evictable, self._unordered
        for node in nodes:
            if node in unordered:
                del unordered[node]
            elif node in order:
                order.discard(node)
            else:
                continue
            order.add(node, now)

    def _order_all(self) -> None:
        """Give a place in the order to every node that may be evicted. The node stored last
        comes first, because the end of a prompt is stored last and must be evicted first."""
        now, order = self.clock.now(), self._evictable
        for node in reversed(self._unordered):
            order.add(node, now)
        self._unordered.clear()

    def _link(self, nodes: list[Node]) -> None:
        """Make each node the parent of the next."""
        for parent, node in pairwise(nodes):
            if node.parent is None:
                node.parent = parent
                parent.children[node.first] = node
                parent.device_children += 1

    def _leave_tier(self, node: Node) -> None:
        node.device = EMPTY
        if node.parent is not None:
            node.parent.device_children -= 1

    def _enter_tier(self, node: Node) -> None:
        node.device = _PRESENT
        if node.parent is not None:
            node.parent.device_children += 1

    def _unlink(self, node: Node) -> None:
        """Remove the references to a node that has left."""
        if node.parent is not None:
            node.parent.children.pop(node.first, None)
            node.parent = None
        for child in node.children.values():
            child.parent = None
        node.children.clear()


def _paths(
    key_groups: Sequence[Sequence[OffloadKey]], req_context: ReqContext
) -> list[list[OffloadKey]]:
    """The keys of each KV cache group, from the start of the prompt to the last chunk of
    `key_groups`. Chunks that are only in the GPU's cache are included."""
    ends = positions(req_context)
    by_group = group_paths(req_context)
    paths = []
    for keys in key_groups:
        whole = by_group.get(group_of(keys[0]), []) if keys else []
        if whole and set(whole).issuperset(keys):
            observed = max(ends[key] for key in keys)
            paths.append([key for key in whole if ends[key] <= observed])
        else:
            paths.append(list(keys))
    return [path for path in paths if path]
