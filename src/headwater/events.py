"""Changes of the cache as values: blocks that became findable in a tier, and blocks that
left.

Recorded by `cache.kv_event_log` when KV events are enabled, and published by `metrics`.
"""

from dataclasses import dataclass
from typing import TypeAlias

from headwater.types import BlockKey, Tier


@dataclass(slots=True, kw_only=True)
class BlocksStored:
    """A run of blocks can be found in `tier` from now on. Not modified after it is built.

    Not frozen, because a snapshot builds one for each run of the cache, and building a frozen
    one takes three times as long.
    """

    tier: Tier
    keys: list[BlockKey]
    parent: BlockKey | None
    """Key of the block before the run; None if the run begins a path."""

    tokens: bytes
    """Token ids of the run, int32 little-endian; empty for salted blocks, whose tokens are
    private."""

    adapter: str = ""
    salt_id: str = ""
    """Identifies the salt without disclosing it; empty without a salt."""


@dataclass(slots=True, kw_only=True)
class BlocksRemoved:
    """These blocks are not in `tier` any more."""

    tier: Tier
    keys: list[BlockKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksCleared:
    """All tiers are empty now."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared
