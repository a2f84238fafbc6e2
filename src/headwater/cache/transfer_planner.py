"""Plan copies between tiers.

A plan is a value with a job number; the mover carries it out. Until the job ends, its slots are
neither free nor findable. Copies from or to the device also pin their path. Copies between host
and storage pin nothing on the device: storage may be slow or never answer, and admission must
not wait for it. `JobFinisher` applies what the end of a job changes.
"""

from collections.abc import Container, Mapping

from headwater.cache.evictor import Evictor
from headwater.cache.jobs import JobRecord, JobTable, Segment, leading
from headwater.cache.node import Node
from headwater.cache.pins import Pins
from headwater.cache.plan import JobOwner, LoadJob, Lookup, Match, OffloadJob, Removal
from headwater.cache.pool import SlotState, TierPool
from headwater.cache.residency import Residency
from headwater.cache.tree import PrefixTree
from headwater.cache.write_queue import HostWrite, WriteKind, WriteQueue
from headwater.errors import InvariantError
from headwater.types import EMPTY, BlockKey, Slots, Tier

_RUN_BLOCKS = 128
"""A job that writes to the host gets no further node once it has this many blocks: its blocks are
findable only when all of them have arrived."""

_DEVICE, _HOST, _STORAGE = Tier
_MOVING = SlotState.MOVING
_INTO_FREE, _NEXT_VICTIM = WriteKind.INTO_FREE, WriteKind.NEXT_VICTIM


class TransferPlanner:
    """Plans loads and offloads, and puts each plan into the job table."""

    def __init__(
        self,
        tree: PrefixTree,
        tier_pools: Mapping[Tier, TierPool],
        pins: Pins,
        evictor: Evictor,
        residency: Residency,
        writes: WriteQueue,
        jobs: JobTable,
    ) -> None:
        self._tree = tree
        self._device = tier_pools[Tier.DEVICE]
        self._host = tier_pools[Tier.HOST]
        self._pins = pins
        self._evictor = evictor
        self._residency = residency
        self._writes = writes
        self._jobs = jobs

    def plan_load(
        self, match: Match, limit: int, owner: JobOwner | None, *, now: float
    ) -> LoadJob | None:
        """Plan to copy the next part of `match` one tier up; None when nothing can be copied."""
        if match.loading is not None:
            return None
        nodes = self._pins.matched_nodes(match, now)
        start = match.device_blocks
        if match.host_blocks:
            segments = _segments(nodes, start, min(match.host_blocks, limit))
            return self._load_from_host(segments, owner)
        count = min(match.storage_blocks, limit)
        segments = _segments(nodes, start + match.host_blocks, count)
        return self._load_from_storage(segments, owner, now=now)

    def plan_offloads(
        self,
        limit: int,
        limit_stored: int | None,
        owner: JobOwner | None,
    ) -> list[OffloadJob]:
        """Plan the queued writes. Without `limit_stored`, storage gets the part of `limit` that
        the host does not use."""
        writes = self._writes
        plans: list[OffloadJob] = []
        if writes.may_have_host_writes:
            plans = self._plan_host_writes(limit, owner)
            limit -= sum(plan.num_blocks for plan in plans)
        to_store = limit if limit_stored is None else limit_stored
        if to_store > 0 and writes.may_have_storage_writes:
            stored = self._plan_storage_writes(to_store, owner)
            plans += stored
            if limit_stored is None:
                limit -= sum(plan.num_blocks for plan in stored)
            # The storage queue may have asked for blocks that have to be written to the host
            # first. They are planned now, so that a second call without a change plans nothing.
            if writes.may_have_host_writes:
                plans += self._plan_host_writes(limit, owner)
        return plans

    def _plan_host_writes(self, limit: int, owner: JobOwner | None) -> list[OffloadJob]:
        """Plan up to `limit` blocks of the queued writes to the host.

        One job writes several nodes: it costs the loop little more than a job for one.
        """
        plans: list[OffloadJob] = []
        if limit <= 0:
            return plans
        run: list[HostWrite] = []
        size = 0
        for write in self._writes.host_candidates():
            if run and (size >= _RUN_BLOCKS or write.kind is not run[0].kind):
                plans += self._write_to_host(run, size, owner)
                run, size = [], 0
            count = self._num_writable(write, limit, size)
            if count:
                write.num_blocks = count
                run.append(write)
                size += count
                limit -= count
                if limit <= 0:
                    break
        if run:
            plans += self._write_to_host(run, size, owner)
        return plans

    def _num_writable(self, write: HostWrite, limit: int, num_taken: int) -> int:
        """How many blocks of `write` are planned, if the run before it takes `num_taken`. The node
        leaves the queue when nothing of it is left to write, or when there is no free slot."""
        node = write.node
        if node.jobs:  # the node is in the queue, too, and is being written already
            return 0
        unwritten = len(node.device) - len(node.host)
        room = limit
        if write.kind is _INTO_FREE:
            room = min(limit, self._host.pool.num_free - num_taken)
        if unwritten <= room:
            self._writes.suspend(node)
            return unwritten
        if room < limit:
            self._writes.drop(node)
        return room

    def _write_to_host(
        self, run: list[HostWrite], num_blocks: int, owner: JobOwner | None
    ) -> list[OffloadJob]:
        """Start one job for the nodes of `run`, as far as there are host slots."""
        kind = run[0].kind
        segments = [Segment(w.node, len(w.node.host), w.num_blocks) for w in run]
        target = self._take_host(
            num_blocks,
            keep={segment.node for segment in segments},
            may_evict=kind is not _INTO_FREE,
        )
        if target is None or len(target) < num_blocks:
            kept = leading(segments, 0 if target is None else len(target))
            for segment in segments[max(len(kept) - 1, 0) :]:
                self._writes.suspend(segment.node)
            segments = kept
        if target is None:
            return []
        source = [s.node.device[s.start : s.start + s.count] for s in segments]
        slots = self._host.pool.joined(source)
        plan = OffloadJob(self._jobs.new_id(), _DEVICE, _HOST, slots, target, owner=owner)
        ends = tuple([segment.node for segment in segments])
        for node in ends:
            self._pins.pin(node)
        cold = kind is _NEXT_VICTIM
        used = frozenset([node.used for node in ends]) if cold else frozenset()
        self._start(JobRecord(plan, segments, ends, pins_ends=True, cold=cold, used=used))
        return [plan]

    def _plan_storage_writes(self, limit: int, owner: JobOwner | None) -> list[OffloadJob]:
        """Plan up to `limit` blocks of the queued writes to storage."""
        plans: list[OffloadJob] = []
        while limit > 0 and (node := self._writes.next_to_store()) is not None:
            start = node.num_stored
            count = min(len(node.host) - start, limit)
            plan = OffloadJob(
                self._jobs.new_id(),
                _HOST,
                _STORAGE,
                node.host[start : start + count],
                EMPTY,
                tuple(self._tree.keys(node)[start : start + count]),
                self._tree.key_before(node, start),
                owner,
            )
            # A slot that is reused during the write would be stored under a wrong key.
            self._host.pool.begin_read(plan.source_slots)
            self._start(JobRecord(plan, [Segment(node, start, count)], (node,)))
            plans.append(plan)
            limit -= count
        return plans

    def start(self, plan: Lookup | Removal) -> None:
        """Put a job that holds no slots into the table."""
        self._jobs.start(JobRecord(plan))

    def _load_from_host(
        self, segments: list[Segment], owner: JobOwner | None
    ) -> LoadJob | None:
        if not segments:
            return None
        count = sum(segment.count for segment in segments)
        device, node = self._device, segments[-1].node
        missing = count - device.pool.num_free
        if missing > device.evictable - self._pins.withheld_by(node):
            return None
        self._pins.pin(node)
        target = self._evictor.take_device(count, _MOVING)
        source = [s.node.host[s.start : s.start + s.count] for s in segments]
        slots = self._host.pool.joined(source)
        return self._start_load(segments, _HOST, slots, target, owner)

    def _load_from_storage(
        self, segments: list[Segment], owner: JobOwner | None, *, now: float
    ) -> LoadJob | None:
        if not segments:
            return None
        count = sum(segment.count for segment in segments)
        first, node = segments[0], segments[-1].node
        if len(first.node.host) != first.start:
            # The device has leading blocks of this node that the host does not have. The host
            # must have a leading part of a node, so the node is split there.
            self._pins.split(first.node, first.start, now)
            first.start = 0
        # The pin protects the path only while host slots are taken. During the read the path is
        # merely the most recently used; if it is evicted, the read is in vain and harmless.
        self._pins.pin(node)
        target = self._take_host(count)
        self._residency.touch_host(node, now=now)
        self._pins.unpin(node, now=now)
        if target is None:
            return None
        plan = self._start_load(segments, _STORAGE, EMPTY, target, owner)
        self._evictor.bound_stored()
        return plan

    def _start_load(
        self,
        segments: list[Segment],
        source: Tier,
        slots: Slots,
        target: Slots | None,
        owner: JobOwner | None,
    ) -> LoadJob:
        """Start a load of as many blocks of `segments` as there are `target` slots."""
        if target is None:
            raise InvariantError("blocks counted as available could not be taken")
        keys: tuple[BlockKey, ...] = ()
        if source is _STORAGE:
            runs = (self._tree.keys(s.node)[s.start : s.start + s.count] for s in segments)
            keys = tuple(key for run in runs for key in run)[: len(target)]
        plan = LoadJob(
            self._jobs.new_id(), source, Tier(source - 1), slots, target, keys, owner=owner
        )
        ends = (segments[-1].node,)
        from_host = source is _HOST
        self._start(JobRecord(plan, leading(segments, len(target)), ends, pins_ends=from_host))
        return plan

    def _take_host(
        self, count: int, keep: Container[Node] = (), *, may_evict: bool = True
    ) -> Slots | None:
        """Up to `count` host slots, evicting as needed but nothing of `keep`; None when no slot
        is available."""
        pool = self._host.pool
        if may_evict and count > pool.num_free:
            self._evictor.evict_host(count - pool.num_free, keep)
        count = min(count, pool.num_free)
        return pool.take(count, _MOVING) if count > 0 else None

    def _start(self, record: JobRecord) -> None:
        """Put a job into the table and take its nodes out of the host order."""
        for segment in record.segments:
            if len(segment.node.host) and not segment.node.jobs:
                self._host.discard(segment.node)
        self._jobs.start(record)


def _segments(nodes: list[Node], start: int, count: int) -> list[Segment]:
    """Blocks [start, start + count) of the path that consists of `nodes`, node by node."""
    segments = []
    for node in nodes:
        first = max(start - node.start, 0)
        last = min(start + count - node.start, node.num_blocks)
        if first < last:
            segments.append(Segment(node, first, last - first))
    return segments
