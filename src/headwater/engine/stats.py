"""Builds `EngineStats`: one snapshot of what scheduler, cache, mover and hand-offs count."""

from headwater.cache import CacheStats
from headwater.cache.pool import PoolStats
from headwater.disagg.handoff.controller import HandoffCounts
from headwater.disagg.handoff.resources import SideTotals
from headwater.disagg.protocol.messages import REFUSALS
from headwater.metrics.stats import EngineStats, HandoffStats, LinkStats, TierStats
from headwater.scheduler.stats import SchedulerStats
from headwater.transfer.mover import LinkTotals, Mover

_TIERS = ("device", "host", "storage")


def engine_stats(
    scheduler: SchedulerStats,
    cache: CacheStats,
    mover: Mover,
    *,
    decide_s: float,
    step_s: float,
    num_idle_turns: int = 0,
    peers: HandoffCounts | None = None,
) -> EngineStats:
    """The snapshots of all parts in one value, with plain numbers and names."""
    ledger = cache.ledger
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        is_paused=scheduler.is_paused,
        num_steps=scheduler.num_steps,
        num_preemptions=scheduler.num_preemptions,
        decide_s=decide_s,
        step_s=step_s,
        num_idle_turns=num_idle_turns,
        queue_s=scheduler.queue_s,
        num_admitted=scheduler.num_admitted,
        tiers={
            "device": _tier(cache.device, cache.device_evictable, cache.evicted_device),
            "host": _tier(cache.host, cache.host_evictable, cache.evicted_host),
        },
        links={
            name: _link(totals, 0 if name == "lookup" else mover.block_bytes)
            for name, totals in mover.links.items()
        },
        storage=mover.storage_stats(),
        load_choices=scheduler.load_choices,
        rates=scheduler.rates,
        predictions=scheduler.predictions,
        num_duplicates=cache.duplicate_blocks,
        num_unwritten=cache.unwritten_blocks,
        lost_blocks=cache.lost_blocks,
        unstored_blocks=cache.unstored_blocks,
        recent_loads=scheduler.recent_loads,
        handoffs={} if peers is None else _handoffs(peers),
        hints=cache.sessions.hints,
        num_sessions=cache.sessions.num_sessions,
        promised_blocks=cache.sessions.promised_blocks,
        queries=ledger.queries,
        query_tokens=ledger.prompt_tokens,
        found_tokens={tier: scheduler.found_tokens.get(tier, 0) for tier in _TIERS},
        misses=scheduler.misses,
    )


def _handoffs(peers: HandoffCounts) -> dict[str, HandoffStats]:
    return {
        "prefill": _side(peers.prefill, peers.num_prefilling),
        "decode": _side(peers.decode, peers.num_receiving),
    }


def _side(totals: SideTotals, in_flight: int) -> HandoffStats:
    reasons = totals.failures.items()
    return HandoffStats(
        in_flight=in_flight,
        asks=totals.num_asks,
        done=totals.num_done,
        refusals={name: num for name, num in reasons if name in REFUSALS},
        failures={name: num for name, num in reasons if name not in REFUSALS},
        num_bytes=totals.num_bytes,
        seconds=dict(totals.seconds),
    )


def _tier(pool: PoolStats, evictable: int, evicted: int) -> TierStats:
    return TierStats(
        num_blocks=pool.total,
        free=pool.free,
        held=pool.held + pool.moving + pool.quarantined,
        cached=pool.cached,
        evictable=evictable,
        evicted=evicted,
    )


def _link(totals: LinkTotals, block_bytes: int) -> LinkStats:
    return LinkStats(
        num_jobs=totals.num_jobs,
        num_blocks=totals.num_blocks,
        num_bytes=totals.num_blocks * block_bytes,
        busy_s=totals.busy_s,
        failures=dict(totals.failures),
        fastest_bytes_s=totals.fastest_blocks_s * block_bytes,
        in_flight=totals.in_flight,
        blocks_in_flight=totals.blocks_in_flight,
    )
