"""Decides where blocks are: prefix tree, tiers, leases and planned jobs. Pure."""

from headwater.cache.config import CacheConfig
from headwater.cache.host_log import AdoptedRun, HostArrival, HostChange, HostCleared
from headwater.cache.keys import (
    KeyScheme,
    MediaSpan,
    Namespace,
    PathKeys,
    TokenPath,
    media_by_block,
)
from headwater.cache.plan import (
    InFlight,
    Job,
    JobEffect,
    JobOutcome,
    JobOwner,
    JobStatus,
    Lease,
    LoadJob,
    Lookup,
    Match,
    MissReason,
    OffloadJob,
    Removal,
    TransferJob,
)
from headwater.cache.policy import FinishedRequest, Hint
from headwater.cache.stats import CacheStats
from headwater.cache.tiered import TieredCache

__all__ = [
    "AdoptedRun",
    "CacheConfig",
    "CacheStats",
    "FinishedRequest",
    "Hint",
    "HostArrival",
    "HostChange",
    "HostCleared",
    "InFlight",
    "Job",
    "JobEffect",
    "JobOutcome",
    "JobOwner",
    "JobStatus",
    "KeyScheme",
    "Lease",
    "LoadJob",
    "Lookup",
    "Match",
    "MediaSpan",
    "MissReason",
    "Namespace",
    "OffloadJob",
    "PathKeys",
    "Removal",
    "TieredCache",
    "TokenPath",
    "TransferJob",
    "media_by_block",
]
