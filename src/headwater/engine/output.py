"""What the engine loop hands out: new tokens a sequence, and a snapshot of everything."""

from headwater.cache import CacheStats
from headwater.cache.pool import PoolStats
from headwater.metrics.stats import EngineStats, TierStats
from headwater.scheduler.output import SequenceOutput
from headwater.scheduler.stats import SchedulerStats
from headwater.scheduler.usage import Usage

__all__ = ["EngineStats", "SequenceOutput", "Usage", "engine_stats"]


def engine_stats(
    scheduler: SchedulerStats, cache: CacheStats, *, decide_s: float, step_s: float
) -> EngineStats:
    """Every owner's snapshot in one, in plain numbers and names."""
    ledger = cache.ledger
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        is_paused=scheduler.is_paused,
        num_steps=scheduler.num_steps,
        num_preemptions=scheduler.num_preemptions,
        decide_s=decide_s,
        step_s=step_s,
        queue_s=scheduler.queue_s,
        num_admitted=scheduler.num_admitted,
        tiers={
            "device": _tier(cache.device, cache.device_evictable),
            "host": _tier(cache.host, cache.host_evictable),
        },
        queries=ledger.queries,
        query_tokens=ledger.prompt_tokens,
        found_tokens={tier.name.lower(): n for tier, n in ledger.tokens_by_tier.items()},
        misses={reason.value: n for reason, n in ledger.misses_by_reason.items()},
    )


def _tier(pool: PoolStats, evictable: int) -> TierStats:
    return TierStats(
        num_blocks=pool.total,
        free=pool.free,
        held=pool.held + pool.moving + pool.quarantined,
        cached=pool.cached,
        evictable=evictable,
    )
