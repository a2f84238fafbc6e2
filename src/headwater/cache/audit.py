"""`TieredCache.check()`: every invariant of the cache, verified from scratch.

O(everything), with no effect; tests call it after each operation, the engine when idle.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from headwater.cache.node import Node
from headwater.cache.pool import SlotState
from headwater.cache.tier_pool import TierPool
from headwater.errors import InvariantError
from headwater.types import EMPTY, Slots, Tier

if TYPE_CHECKING:
    from headwater.cache.tiered import TieredCache


def audit(cache: "TieredCache") -> None:
    """Raise InvariantError if any book does not balance."""
    cache.tree.check()
    nodes = list(cache.tree.nodes())
    for node in nodes:
        _check_residency(node)
    _check_pins(cache, nodes)
    for tier_pool in (cache.device, cache.host):
        tier_pool.pool.check()
        _check_owners(cache, tier_pool, [*nodes, *cache.pins.retired])
        _check_order(tier_pool, nodes)
    _check_stored_only(cache, nodes)


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise InvariantError(sentence)


def _check_residency(node: Node) -> None:
    """A node is covered; its parent is in each block's tier or above; its counts are true."""
    parent = node.parent
    if parent is None:
        raise InvariantError("a node has no parent")
    _require(node.covered() == node.num_blocks, "a node has a block that is in no tier")
    if len(node.device):
        _require(len(parent.device) == parent.num_blocks, "a device block has no parent there")
    if len(node.host):
        above = max(len(parent.device), len(parent.host))
        _require(above == parent.num_blocks, "a host block has no parent there or above")
    children = node.children.values()
    on_device = sum(1 for child in children if len(child.device))
    on_host = sum(1 for child in children if len(child.host))
    _require(node.device_children == on_device, "children on the device are miscounted")
    _require(node.host_children == on_host, "children on the host are miscounted")


def _check_pins(cache: "TieredCache", nodes: list[Node]) -> None:
    """Pins are exactly those of the leases and jobs, on whole paths."""
    expected: Counter[Node] = Counter()
    ends = [lease.node for lease in cache.leases]
    ends += [job.node for job in cache.transfers.jobs.by_id.values() if not job.detached]
    for end in ends:
        at: Node | None = end
        while at is not None:
            expected[at] += 1
            at = at.parent
    for node in [*nodes, *cache.tree.roots.values(), *cache.pins.retired]:
        _require(node.pins == expected[node], "pins differ from the leases and jobs there are")
    jobs = set(cache.transfers.jobs.by_id.values())
    for node in nodes:
        _require(jobs.issuperset(node.jobs), "a node is in a job that has ended")
    for lease in cache.leases:
        if not lease.node.gone:
            _require(lease.node.end == lease.num_blocks, "a lease does not end with its node")
            full = len(lease.node.device) == lease.node.num_blocks
            _require(full, "a leased block is not on the device")


def _check_owners(cache: "TieredCache", tier_pool: TierPool, nodes: Iterable[Node]) -> None:
    """Every slot that is not free has exactly the owner its state says."""
    cached = _slots(
        node.device if tier_pool.tier is Tier.DEVICE else node.host for node in nodes
    )
    jobs = cache.transfers.jobs.by_id.values()
    here = [job for job in jobs if job.transfer.target is tier_pool.tier]
    moving = _slots(job.transfer.target_slots for job in here if not job.timed_out)
    late = _slots(job.transfer.target_slots for job in here if job.timed_out)
    for state, slots in (
        (SlotState.CACHED, cached),
        (SlotState.MOVING, moving),
        (SlotState.QUARANTINED, late),
    ):
        owned = tier_pool.pool.owned(state)
        same = len(owned) == len(slots) and bool(np.array_equal(owned, np.sort(slots)))
        _require(
            same, f"{tier_pool.tier.name} slots in state {state.name} have no or two owners"
        )


def _check_order(tier_pool: TierPool, nodes: list[Node]) -> None:
    """A node is in the order exactly while it may be evicted."""
    evictable = 0
    for node in nodes:
        kept = node.pins if tier_pool.tier is Tier.DEVICE else len(node.jobs)
        expected = tier_pool.blocks(node) > 0 and not kept
        _require(
            (node in tier_pool.order) == expected, "the eviction order has the wrong nodes"
        )
        evictable += tier_pool.blocks(node) if expected else 0
    _require(tier_pool.evictable == evictable, "evictable blocks are miscounted")
    in_order = sum(1 for _ in tier_pool.order.victims())
    known = sum(1 for node in nodes if node in tier_pool.order)
    _require(in_order == known, "a node that is gone is in the eviction order")


def _check_stored_only(cache: "TieredCache", nodes: list[Node]) -> None:
    expected = {n for n in nodes if not len(n.device) and not len(n.host)}
    _require(set(cache.evictor.stored_only) == expected, "nodes only in storage are miscounted")


def _slots(parts: Iterable[Slots]) -> Slots:
    return np.concatenate([EMPTY, *parts])
