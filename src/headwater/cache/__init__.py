"""Decides where blocks are: the prefix tree, the tiers, leases and plans. Pure."""

from headwater.cache.config import CacheConfig
from headwater.cache.keys import KeyScheme, MediaSpan, Namespace, TokenPath, media_by_block
from headwater.cache.lease import Lease
from headwater.cache.plan import (
    Demotion,
    Ending,
    Extent,
    InFlight,
    Landing,
    Lookup,
    Match,
    MissReason,
    Outcome,
    Promotion,
    Removal,
    Transfer,
)
from headwater.cache.policy import Hint, Turn
from headwater.cache.stats import CacheStats
from headwater.cache.tiered import TieredCache

__all__ = [
    "CacheConfig",
    "CacheStats",
    "Demotion",
    "Ending",
    "Extent",
    "Hint",
    "InFlight",
    "KeyScheme",
    "Landing",
    "Lease",
    "Lookup",
    "Match",
    "MediaSpan",
    "MissReason",
    "Namespace",
    "Outcome",
    "Promotion",
    "Removal",
    "TieredCache",
    "TokenPath",
    "Transfer",
    "Turn",
    "media_by_block",
]
