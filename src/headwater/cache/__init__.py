"""Decides where blocks are: the prefix tree, the tiers, leases and plans. Pure."""

from headwater.cache.config import CacheConfig
from headwater.cache.keys import KeyScheme, MediaSpan, Namespace, TokenPath, media_by_block
from headwater.cache.lease import Lease
from headwater.cache.plan import (
    Demotion,
    InFlight,
    JobEffect,
    JobOutcome,
    JobStatus,
    Lookup,
    Match,
    MissReason,
    Promotion,
    Removal,
    TierRange,
    TransferJob,
)
from headwater.cache.policy import FinishedRequest, Hint
from headwater.cache.stats import CacheStats
from headwater.cache.tiered import TieredCache

__all__ = [
    "CacheConfig",
    "CacheStats",
    "Demotion",
    "FinishedRequest",
    "Hint",
    "InFlight",
    "JobEffect",
    "JobOutcome",
    "JobStatus",
    "KeyScheme",
    "Lease",
    "Lookup",
    "Match",
    "MediaSpan",
    "MissReason",
    "Namespace",
    "Promotion",
    "Removal",
    "TierRange",
    "TieredCache",
    "TokenPath",
    "TransferJob",
    "media_by_block",
]
