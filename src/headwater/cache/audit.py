"""`TieredCache.check()`: every invariant and bound of the cache, verified from scratch.

It is slow and changes nothing. Tests call it after each operation; the engine calls it when
idle.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from headwater.cache.node import Node
from headwater.cache.plan import TransferJob
from headwater.cache.pool import SlotState, TierPool
from headwater.cache.sessions import MAX_SESSIONS
from headwater.errors import InvariantError
from headwater.types import EMPTY, Slots, Tier

if TYPE_CHECKING:
    from headwater.cache.parts import CacheParts


def audit(cache: "CacheParts") -> None:
    """Raise InvariantError if an invariant or a bound is violated."""
    cache._tree.check()
    nodes = list(cache._tree.nodes())
    for node in nodes:
        _check_residency(node)
    _check_pins(cache, nodes)
    for tier_pool in (cache._device, cache._host):
        tier_pool.pool.check()
        _check_owners(cache, tier_pool, [*nodes, *cache._pins.retired])
        _check_order(tier_pool, nodes)
    for node in cache._host.duplicates:
        _require(node in cache._host.order, "a duplicate is not in the host order")
        both = 0 < len(node.host) <= len(node.device)
        _require(both, "a duplicate is not on the device and on the host")
    _check_reads(cache)
    _check_stored_only(cache, nodes)
    _check_bounds(cache)


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise InvariantError(sentence)


def _check_residency(node: Node) -> None:
    """Each block is in a tier, its parent is in that tier or above, and counts are correct."""
    parent = node.parent
    if parent is None:
        raise InvariantError("a node has no parent")
    _require(node.covered() == node.num_blocks, "a node has a block that is in no tier")
    if len(node.device):
        _require(
            len(parent.device) == parent.num_blocks,
            "a device block has no parent on the device",
        )
    if len(node.host):
        above = max(len(parent.device), len(parent.host))
        _require(
            above == parent.num_blocks, "a host block has no parent on the host or the device"
        )
    children = node.children.values()
    on_device = sum(1 for child in children if len(child.device))
    on_host = sum(1 for child in children if len(child.host))
    _require(node.device_children == on_device, "the count of children on the device is wrong")
    _require(node.host_children == on_host, "the count of children on the host is wrong")


def _check_pins(cache: "CacheParts", nodes: list[Node]) -> None:
    """Pins are exactly those of leases and of jobs that copy from or to the device."""
    records = list(cache._jobs.by_id.values())
    expected: Counter[Node] = Counter()
    ends: list[Node | None] = [lease.node for lease in cache._leases]
    ends += [end for record in records if record.pins_ends for end in record.ends]
    for end in ends:
        at = end
        while at is not None:
            expected[at] += 1
            at = at.parent
    for node in [*nodes, *cache._tree.roots.values(), *cache._pins.retired]:
        _require(node.pins == expected[node], "pins differ from the leases and jobs in flight")
    for node in nodes:
        _require(set(records).issuperset(node.jobs), "a node refers to a job that has ended")
    for lease in cache._leases:
        if not lease.node.gone:
            _require(
                lease.node.end == lease.num_blocks, "a lease does not end where its node ends"
            )
            full = len(lease.node.device) == lease.node.num_blocks
            _require(full, "a leased block is not on the device")


def _check_owners(cache: "CacheParts", tier_pool: TierPool, nodes: Iterable[Node]) -> None:
    """Every slot that is not free or held has exactly the owner that its state says."""
    tier, pool = tier_pool.tier, tier_pool.pool
    cached = _slots(node.device if tier is Tier.DEVICE else node.host for node in nodes)
    records = [r for r in cache._jobs.by_id.values() if _targets(r.plan, tier)]
    moving = _slots(r.plan.target_slots for r in records if not r.timed_out)  # type: ignore[union-attr]
    late = _slots(r.plan.target_slots for r in records if r.timed_out)  # type: ignore[union-attr]
    # A slot that lost its block while a write to storage reads it is quarantined too.
    orphans = np.setdiff1d(np.flatnonzero(pool.readers()), cached)
    for state, slots in (
        (SlotState.CACHED, cached),
        (SlotState.MOVING, moving),
        (SlotState.QUARANTINED, np.concatenate((late, orphans))),
    ):
        owned = pool.owned(state)
        same = len(owned) == len(slots) and bool(np.array_equal(owned, np.sort(slots)))
        _require(same, f"{tier.name} slots in state {state.name} have no owner or two owners")


def _check_order(tier_pool: TierPool, nodes: list[Node]) -> None:
    """A node is in the eviction order of a tier exactly while its blocks there may be
    evicted."""
    evictable = 0
    for node in nodes:
        kept = node.pins if tier_pool.tier is Tier.DEVICE else len(node.jobs)
        expected = tier_pool.blocks(node) > 0 and not kept
        _require(
            (node in tier_pool.order) == expected, "the eviction order has the wrong nodes"
        )
        evictable += tier_pool.blocks(node) if expected else 0
    _require(tier_pool.evictable == evictable, "the count of evictable blocks is wrong")
    in_order = sum(1 for _ in tier_pool.order.victims())
    known = sum(1 for node in nodes if node in tier_pool.order)
    _require(in_order == known, "a node that left the tree is in the eviction order")


def _check_reads(cache: "CacheParts") -> None:
    """Host slots are marked as read exactly by the writes to storage in flight."""
    expected = np.zeros(cache._host.pool.num_slots, dtype=np.int64)
    for record in cache._jobs.by_id.values():
        if _targets(record.plan, Tier.STORAGE):
            expected[record.plan.source_slots] += 1  # type: ignore[union-attr]
    same = bool(np.array_equal(expected, cache._host.pool.readers()))
    _require(same, "the host slots marked as read are not those that writes in flight read")


def _check_stored_only(cache: "CacheParts", nodes: list[Node]) -> None:
    """The list of nodes that only storage has is correct and within its limit."""
    expected = {n for n in nodes if not len(n.device) and not len(n.host)}
    stored_only = cache._tree.stored_only
    _require(set(stored_only) == expected, "the list of nodes only in storage is wrong")
    num_read = sum(1 for node in stored_only if node.jobs or node.pins)
    limit = cache.config.max_stored_nodes + num_read
    _require(
        len(stored_only) <= limit, f"{len(stored_only)} nodes only in storage, max {limit}"
    )


def _check_bounds(cache: "CacheParts") -> None:
    """No record refers to a node that left the tree, and no list is longer than its limit."""
    limits = {"ghosts": (len(cache._ghosts), cache.config.max_ghosts)}
    limits["sessions"] = (sum(1 for _ in cache._sessions), MAX_SESSIONS)
    for name, (count, limit) in limits.items():
        _require(count <= limit, f"{count} {name} are remembered, max {limit}")
    for tier in (Tier.DEVICE, Tier.HOST):
        for node in cache._writes.queued(tier):
            blocks = node.device if tier is Tier.DEVICE else node.host
            _require(
                not node.gone and len(blocks) > 0, "the write queue has a node without blocks"
            )
    nodes = [*cache._tree.nodes(), *cache._pins.retired]
    both = sum(node.num_both for node in nodes)
    _require(cache._tree.num_both == both, "the count of blocks on both tiers is wrong")
    _require(
        cache._writes.is_bounded, "the queue of writes to storage is larger than its bound"
    )
    for entry in cache._sessions:
        _require(not entry.node.gone, "a session refers to a node that left the tree")
        _require(entry in (entry.node.sessions or ()), "a node does not list its session")


def _targets(plan: object, tier: Tier) -> bool:
    return isinstance(plan, TransferJob) and plan.target is tier


def _slots(parts: Iterable[Slots]) -> Slots:
    return np.concatenate([EMPTY, *parts])
