"""A snapshot of the cache's counters."""

from dataclasses import dataclass

from headwater.cache.matcher import LedgerStats
from headwater.cache.pool import PoolStats
from headwater.cache.sessions import SessionStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters only; the reader computes ratios."""

    device: PoolStats
    host: PoolStats
    device_evictable: int
    host_evictable: int
    evicted_device: int
    evicted_host: int
    lost_blocks: int
    """Blocks that left their last tier."""

    unstored_blocks: int
    """The part of `lost_blocks` that was in memory only, not in storage."""

    duplicate_blocks: int
    """Blocks that are on the device and on the host."""

    unwritten_blocks: int
    """Cached device blocks that the host does not have; 0 without a host tier."""

    nodes: int
    leases: int
    jobs: int
    late_outcomes: int
    """Outcomes of jobs that were not in flight."""

    generation: int
    ledger: LedgerStats
    sessions: SessionStats
