"""The parts of the tiered cache, how they are connected, and what can be read from them.

Nothing here changes the cache. The parts are private: code outside `headwater.cache` uses the
methods of `TieredCache`.
"""

import sys
from collections.abc import Sequence

from headwater.cache.audit import audit
from headwater.cache.config import CacheConfig
from headwater.cache.evictor import Evictor
from headwater.cache.host_log import HostBlockLog, HostChange
from headwater.cache.job_finisher import JobFinisher
from headwater.cache.jobs import JobTable
from headwater.cache.keys import KeyScheme, TokenPath
from headwater.cache.kv_event_log import KVEventLog
from headwater.cache.matcher import Ghosts, InFlightPrefixes, Ledger, Matcher
from headwater.cache.outline import Outline, outline
from headwater.cache.pins import Pins
from headwater.cache.plan import Lease
from headwater.cache.policy import Orders, Shape, make_orders
from headwater.cache.policy.session import SessionPolicy
from headwater.cache.policy.weights import Weights
from headwater.cache.pool import PoolStats, SlotState, TierPool
from headwater.cache.publisher import Publisher
from headwater.cache.residency import Residency
from headwater.cache.sessions import Sessions
from headwater.cache.stats import CacheStats
from headwater.cache.transfer_planner import TransferPlanner
from headwater.cache.tree import PrefixTree
from headwater.cache.write_queue import EvictionWindow, WriteQueue
from headwater.events import CacheEvent
from headwater.types import JobId, Slots, Tier


class CacheParts:
    """Builds the parts of one cache, and reads from them."""

    def __init__(self, config: CacheConfig, orders: Orders | None = None) -> None:
        """`orders` replaces the eviction policy that `config.eviction` names."""
        self.config = config
        self.block_tokens = config.block_tokens
        self.generation = 0
        """How many resets there were."""
        scheme = KeyScheme(
            block_tokens=config.block_tokens,
            fingerprint=config.fingerprint,
            kv_format=config.kv_format,
            shard=config.shard,
        )
        if orders is None:
            shape = Shape(
                config.device_blocks, config.host_blocks, config.block_tokens, config.weights
            )
            orders = make_orders(config.eviction, shape)
        tree = self._tree = PrefixTree(scheme)
        device = self._device = TierPool(Tier.DEVICE, config.device_blocks, orders.device)
        host = self._host = TierPool(Tier.HOST, config.host_blocks, orders.host)
        ghosts = self._ghosts = Ghosts(config.max_ghosts)
        events = self._events = KVEventLog(tree) if config.record_events else None
        window = EvictionWindow(config, device)
        writes = self._writes = WriteQueue(config, window, host)
        pins = self._pins = Pins(tree, device, host, writes)
        limit = config.max_stored_nodes
        self._evictor = Evictor(tree, device, host, ghosts, writes, limit, events)
        self._in_flight = InFlightPrefixes(tree)
        self._matcher = Matcher(tree, self._in_flight, ghosts)
        self._publisher = Publisher(tree, device.pool, pins, ghosts, writes, events)
        tiers = {Tier.DEVICE: device, Tier.HOST: host}
        jobs = self._jobs = JobTable()
        self._host_log = HostBlockLog(tree) if config.record_host else None
        residency = self._residency = Residency(tree, host, events, self._host_log)
        parts = pins, self._evictor, residency, writes, jobs
        self._planner = TransferPlanner(tree, tiers, *parts)
        self._finisher = JobFinisher(tiers, *parts, self._publisher.learn_stored)
        self._leases: dict[Lease, None] = {}
        self._sessions = Sessions(round(config.hint_share * config.device_blocks))
        self._ledger = Ledger(config.block_tokens)

    @property
    def version(self) -> int:
        """Changes whenever a match could have another result."""
        return self._tree.version

    @property
    def scheme(self) -> KeyScheme:
        """How block keys are computed; a reload of weights replaces it by another scheme."""
        return self._tree.scheme

    @property
    def num_jobs(self) -> int:
        """Jobs in flight, including timed-out transfers whose executor is still at work."""
        return len(self._jobs.by_id)

    @property
    def num_live_jobs(self) -> int:
        """Jobs in flight that have not timed out: each will end or time out."""
        return sum(not record.timed_out for record in self._jobs.by_id.values())

    def storage_writes(self) -> set[JobId]:
        """Writes to storage in flight, including timed-out ones."""
        return self._jobs.to_storage()

    @property
    def next_due_s(self) -> float | None:
        """When the next session is expected; None when none is expected."""
        return self._sessions.next_due_s

    def may_offload(self, *, num_expected: int = 0, can_store: bool = True) -> bool:
        """Whether `plan_offloads` may find something to write. O(1); called once per step.

        The next admissions take up to `num_expected` device blocks, so the next victims are
        written to the host before that. `can_store` says whether storage may get writes now.
        """
        return self._writes.begin_step(num_expected, can_store=can_store)

    def take_events(self) -> Sequence[CacheEvent]:
        """KV events since the last call, in order; none unless `record_events` is set. Another
        thread may read them: they are built when they are read."""
        return () if self._events is None else self._events.take()

    def take_host_changes(self) -> list[HostChange]:
        """Arrivals in host slots and removals of all host blocks since the last call, in order;
        none unless `record_host` is set."""
        return [] if self._host_log is None else self._host_log.take()

    def snapshot_events(self) -> Sequence[CacheEvent]:
        """KV events that describe every cached block, built when they are read. O(nodes)."""
        return () if self._events is None else self._events.snapshot()

    def outline(self, *, max_depth: int, max_nodes: int) -> Outline:
        """The shape of the prefix tree, without tokens or keys."""
        return outline(
            self._tree,
            tick=self._pins.tick,
            generation=self.generation,
            max_depth=max_depth,
            max_nodes=max_nodes,
        )

    def learned_weights(self) -> Weights | None:
        """What the `session` eviction policy has learned; None for other policies."""
        order = self._device.order
        return order.learned() if isinstance(order, SessionPolicy) else None

    def pool_stats(self, tier: Tier) -> PoolStats:
        """How many slots of the device or the host are in each state."""
        return (self._device if tier is Tier.DEVICE else self._host).pool.stats()

    def held_slots(self) -> Slots:
        """Device slots that sequences hold, ascending. O(slots): for checks."""
        return self._device.pool.owned(SlotState.HELD)

    def stats(self) -> CacheStats:
        """A snapshot of every counter. O(1)."""
        device, both = self._device.pool.stats(), self._tree.num_both
        return CacheStats(
            device=device,
            host=self._host.pool.stats(),
            device_evictable=self._device.evictable,
            host_evictable=self._host.evictable,
            evicted_device=self._device.evicted,
            evicted_host=self._host.evicted,
            lost_blocks=self._evictor.lost,
            unstored_blocks=self._evictor.lost - self._evictor.forgotten,
            duplicate_blocks=both,
            unwritten_blocks=device.cached - both if self.config.host_blocks else 0,
            nodes=self._tree.num_nodes,
            leases=len(self._leases),
            jobs=self.num_jobs,
            late_outcomes=self._finisher.late_outcomes,
            generation=self.generation,
            ledger=self._ledger.stats(),
            sessions=self._sessions.stats(),
        )

    def recall_keys(self, path: TokenPath) -> bool:
        """Let `path` remember the block keys that cached blocks have, and compute none. Returns
        whether those are all keys of `path`."""
        num_blocks = path.num_blocks(self.block_tokens)
        return self._tree.recall_keys(path, num_blocks) >= num_blocks

    def metadata_bytes(self) -> int:
        """Bytes that describe the device blocks: nodes, tokens, slots, and the pool's arrays.
        O(nodes): for benchmarks."""
        total = self._device.pool.array_bytes
        for node in self._tree.nodes():
            parts = (node, node.children, node.tokens, node.first, node.device, node.host)
            total += sum(sys.getsizeof(part) for part in parts)
        return total

    def check(self) -> None:
        """Raise InvariantError if an invariant or a bound is violated. Slow."""
        audit(self)
