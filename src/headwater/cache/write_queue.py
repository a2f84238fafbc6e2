"""The write queue: which nodes are to be copied to a lower tier, by the write policy.

Device and host together should hold what one pool of their joint size would hold. The eviction
window and two rules achieve that:

    eviction order of the device    next victims                       most recently used
                                    |<---- window ---->|
    host copy                       must exist         is a duplicate: it leaves a full host first

1. Blocks inside the window are written to the host before they are evicted from the device.
2. A host copy of a block outside the window is a duplicate. It takes room from a block that is
   in no other tier, so it is the first to leave a full host tier.

The window grows with the blocks that the next admissions need. When it contains every evictable
block (the device is full of running requests), it is searched whenever a block becomes evictable:
a request that ends is written before the next admission.

Bound: a queued node is in the tree and has blocks in the tier that is read. The evictor removes
a node from the queue together with its blocks, so the queue never outgrows the tree.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from math import inf

from headwater.cache.config import CacheConfig
from headwater.cache.node import Node
from headwater.cache.pool import TierPool
from headwater.cache.storage_queue import StorageQueue
from headwater.types import Tier, WritePolicy

_SHARE = 8
"""One device block in this many is inside the window. The window has to hold what one burst of
admissions evicts; a larger one keeps more duplicates."""

_BURSTS = 4
"""The device counts as full of running requests when this many bursts of admissions would evict
everything else. That many bursts can come while one of them is being written. With two,
sessions that do not fit on the device found 0.91 of what they could; with four, 0.96."""

_BURST_MEMORY = 0.99
"""Factor by which the burst decays with each later step that takes blocks."""

_LOOKS = 16
"""The window is searched again when one block in this many has been taken from it."""

_SHORT_RUN = 16
"""Under `auto`, a running sequence has this many unwritten blocks before they are written."""

_PIECE = 64
"""Queued nodes that are looked at together."""

_AUTO = WritePolicy.AUTO
_POLICIES = (WritePolicy.AUTO, WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK)


class EvictionWindow:
    """Knows which device blocks are evicted next. It reads the device order and never changes
    it."""

    def __init__(self, config: CacheConfig, device: TierPool) -> None:
        self.is_enabled = config.host_blocks > 0 and config.write_policy in _POLICIES
        """Whether blocks are written before they are evicted, under this write policy."""
        ahead = config.write_ahead_blocks
        self._least = max(config.device_blocks // _SHARE, 1) if ahead is None else ahead
        self.num_blocks = self._least
        """Blocks inside the window."""
        self._device = device
        self._burst = 0.0
        """The largest number of blocks that the admissions of one recent step took."""
        self._used_before = self._used
        self._searched_at: int | None = None
        """Value of `_used` when the window was last searched."""
        self._searched_state: tuple[int, int] | None = None
        """Value of `_state` after that search."""

    def begin_step(self, num_expected: int) -> None:
        """Measure how many blocks were taken since the last step. The next admissions take up
        to `num_expected`, so the window holds at least that many."""
        device = self._device
        used = device.evicted - device.pool.num_free
        taken = used - self._used_before
        if taken > 0:  # a step that takes nothing changes nothing: replay skips such steps
            self._burst = max(taken, self._burst * _BURST_MEMORY)
        self._used_before = used
        self.num_blocks = num_expected if num_expected > self._least else self._least

    @property
    def has_everything(self) -> bool:
        """Whether every evictable device block may be evicted soon: it is inside the window, or
        the next bursts of admissions take it."""
        device = self._device
        left = device.pool.num_free + device.evictable
        return left < self.num_blocks or left < _BURSTS * self._burst

    @property
    def is_due(self) -> bool:
        """Whether the window should be searched for unwritten nodes. O(1)."""
        if not self.is_enabled:
            return False
        device, window = self._device, self.num_blocks
        num_free = device.pool.num_free
        left = num_free + device.evictable
        if left < window or left < _BURSTS * self._burst:  # `has_everything`, without its call
            return self._searched_state != self._state
        if num_free >= window:
            return False
        used, before = device.evicted - num_free, self._searched_at
        if before is None:
            return True
        if used < before:
            self._searched_at = before = used
        return used - before >= (window // _LOOKS or 1)

    def nodes(self) -> list[Node]:
        """Nodes inside the window, first victim first."""
        # Free slots are used before any victim, so they count towards the distance.
        distance = self._device.pool.num_free
        end = inf if self.has_everything else self.num_blocks
        nodes: list[Node] = []
        for node in self._device.order.victims():
            if distance >= end:
                break
            distance += len(node.device)
            nodes.append(node)
        return nodes

    def finish_search(self) -> None:
        """Note that all nodes of the window are written or being written."""
        self._searched_at, self._searched_state = self._used, self._state

    @property
    def _state(self) -> tuple[int, int]:
        """A value that changes whenever a node becomes evictable, and sometimes at other
        times."""
        return self._device.evictable, self._device.evicted

    @property
    def _used(self) -> int:
        """A number that grows by one with each device block that is taken."""
        return self._device.evicted - self._device.pool.num_free


class WriteKind(Enum):
    """Why a node is written to the host."""

    INTO_FREE = auto()
    """There are free host slots; no host block may be evicted for it."""

    QUEUED = auto()
    """The write policy, a preemption or storage asked for it."""

    NEXT_VICTIM = auto()
    """The device evicts it next; after the write it is the next victim again."""


@dataclass(slots=True)
class HostWrite:
    """A node whose device blocks are to be written to the host."""

    node: Node
    kind: WriteKind
    num_blocks: int = 0
    """Blocks that are planned."""


_INTO_FREE, _QUEUED, _NEXT_VICTIM = WriteKind


class WriteQueue:
    """Nodes with blocks to write, oldest first. A node leaves when nothing is left to write."""

    def __init__(self, config: CacheConfig, window: EvictionWindow, host: TierPool) -> None:
        self._enabled = config.host_blocks > 0
        self.through = self._enabled and config.write_policy in (
            WritePolicy.AUTO,
            WritePolicy.WRITE_THROUGH,
        )
        """Whether every commit has to be queued with `add_committed`."""
        self._storage = config.storage
        self._policy = config.write_policy
        self._select_hits = config.select_hits
        self.window = window
        self._host = host
        self._to_host: dict[Node, bool] = {}
        """For each node, whether host blocks may be evicted for it."""
        self._inside: dict[Node, None] = {}
        """Nodes that the last search found inside the window; some may be gone by now."""
        self._to_storage = StorageQueue(self.add, by_reuse=config.storage_order == "reuse")

    def begin_step(self, num_expected: int, *, can_store: bool) -> bool:
        """Whether there may be something to write. O(1); called once per step."""
        self.window.begin_step(num_expected)
        if self._to_host or (can_store and self._to_storage.may_have_any):
            return True
        return self.window.is_due

    @property
    def may_have_host_writes(self) -> bool:
        """Whether `host_candidates` may have a node. O(1)."""
        return bool(self._to_host) or self.window.is_due

    @property
    def may_have_storage_writes(self) -> bool:
        """Whether `next_to_store` may have a node. O(1)."""
        return self._to_storage.may_have_any

    def add(self, node: Node) -> None:
        """Queue the device blocks of `node` that the host does not have."""
        if self._enabled and len(node.host) < len(node.device) and not node.gone:
            self._to_host[node] = True

    def add_committed(self, node: Node) -> None:
        """Queue `node`, which got new device blocks. Under `auto` they only fill free host
        slots: evicting for them would replace a block that is in no other tier by a duplicate.
        While a request has only a few such blocks, they wait for more blocks or for its end:
        until then its lease keeps them anyway."""
        if self._policy is not _AUTO:
            self.add(node)
        elif self._host.pool.num_free and len(node.device) - len(node.host) >= _SHORT_RUN:
            self._to_host.setdefault(node, False)

    def add_released(self, node: Node, now: float) -> None:
        """Queue the path to `node`: a request that used it ended, and its blocks may be evicted
        soon."""
        queue = self._to_host
        fills = self.through and self._host.pool.num_free > 0
        at: Node | None = node
        while at is not None:
            if fills and len(at.host) < len(at.device):
                queue.setdefault(at, False)
            if self._storage:
                # The eviction policy has marked the path: its chance of return is known now.
                self._to_storage.add(at, now)
            at = at.parent

    def record_hit(self, node: Node) -> None:
        """Count a hit on the path that ends with `node`, and queue the path if the policy says
        so."""
        if not self._enabled:
            return
        selective = self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        at: Node | None = node
        while at is not None:
            at.hits += 1
            if selective and at.hits >= self._select_hits:
                self.add(at)
            at = at.parent

    def add_path(self, node: Node) -> None:
        """Queue the path that ends with `node`, whatever the policy says. The blocks nearest to
        the root come first: a block on the host is of no use without those before it."""
        path: list[Node] = []
        at: Node | None = node
        while at is not None:
            path.append(at)
            at = at.parent
        for each in reversed(path):
            self.add(each)

    def next_to_store(self) -> Node | None:
        """The node whose host blocks are to be written to storage next."""
        return self._to_storage.pop()

    def end_job(self, node: Node, *, written_s: float | None = None) -> None:
        """Let `node` be written to storage, now that a job of it has ended. `written_s` is the
        present time if the job wrote blocks to the host."""
        if self._storage and (written_s is None or not self._to_storage.add(node, written_s)):
            self._to_storage.resume(node)

    def suspend(self, node: Node) -> None:
        """Write nothing more of `node` until it is used again.

        Called when all of it is being written, when there is no room for the rest, or when a
        write failed. Otherwise a tier that is too small or broken would be tried all the time.
        """
        self._to_host.pop(node, None)
        node.suspended_at = node.used

    def suspend_storage(self, node: Node) -> None:
        """A write to storage failed: write nothing more of `node` until it is used again."""
        self._to_storage.discard((node,))

    def drop(self, node: Node) -> None:
        """Remove `node`, for which no host slot is free; it is written when it is in the
        eviction window."""
        self._to_host.pop(node, None)

    def discard(self, nodes: Iterable[Node], tier: Tier) -> None:
        """Remove `nodes` from the queue that reads from `tier`: they have no blocks there any
        more."""
        if tier is Tier.HOST:
            self._to_storage.discard(nodes)
        elif self._to_host:
            for node in nodes:
                self._to_host.pop(node, None)

    def divide(self, head: Node, tail: Node) -> None:
        """A node was split: head and tail take its place in each queue where they have blocks."""
        if tail in self._to_host:
            if len(head.device):
                self._to_host[head] = self._to_host[tail]
            if not len(tail.device):
                del self._to_host[tail]
        self._to_storage.divide(head, tail)

    def host_candidates(self) -> Iterator[HostWrite]:
        """Nodes with device blocks to write: those in the queue, then those in the window."""
        queue, num_kept = self._to_host, 0
        # In short pieces: the caller takes a few nodes and changes the queue meanwhile, and there
        # may be tens of thousands.
        while piece := list(islice(queue.items(), num_kept, num_kept + _PIECE)):
            for node, may_evict in piece:
                if len(node.host) >= len(node.device):
                    queue.pop(node, None)
                elif not node.jobs:
                    yield HostWrite(node, _QUEUED if may_evict else _INTO_FREE)
                num_kept += node in queue
        if self.window.is_due:
            for node in self._unwritten_victims():
                yield HostWrite(node, _NEXT_VICTIM)
            self.window.finish_search()

    def clear(self) -> None:
        """Empty the queue."""
        self._to_host.clear()
        self._inside.clear()
        self._to_storage.clear()

    @property
    def is_bounded(self) -> bool:
        """Whether the queue of writes to storage is within its bound; for checks."""
        return self._to_storage.check_bounds()

    def queued(self, tier: Tier) -> Iterable[Node]:
        """Nodes queued to be read from `tier`; for checks."""
        return self._to_host if tier is Tier.DEVICE else self._to_storage

    def _unwritten_victims(self) -> list[Node]:
        """Update which nodes of the window are duplicates; return those that are not
        written."""
        nodes = self.window.nodes()
        before, inside = self._inside, dict.fromkeys(nodes)
        self._inside = inside
        # A node that is not inside any more was used again, or other nodes are evicted first.
        for node in before:
            if node not in inside and not node.gone:
                self._host.mark_duplicate(node)
        duplicates = self._host.duplicates
        for node in duplicates.keys() & inside.keys():
            del duplicates[node]  # its host copy will soon be the only one
        return [
            node
            for node in nodes
            if len(node.host) < len(node.device)
            and not node.jobs
            and node.suspended_at != node.used
        ]
