"""Settings of the tiered cache."""

from dataclasses import dataclass
from typing import Literal

from headwater.cache.policy import POLICIES
from headwater.cache.policy.weights import Weights
from headwater.errors import ConfigError
from headwater.types import WritePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of one `TieredCache`, checked on construction."""

    device_blocks: int
    """Blocks in the device pool."""

    block_tokens: int = 64
    """Tokens in a block: the unit of matching, eviction and transfer."""

    host_blocks: int = 0
    """Blocks in the host pool; 0 means no host tier."""

    storage: bool = False
    """Whether there is a storage tier below the host tier."""

    write_policy: WritePolicy = WritePolicy.AUTO
    """When device blocks are written to the host tier."""

    select_hits: int = 1
    """With `write_through_selective`, a block is written at its n-th hit."""

    write_ahead_blocks: int | None = None
    """Number of device blocks, of those evicted next, that are written to the host in advance,
    under the policies `auto`, `write_through` and `write_back`; None means an eighth of the
    device."""

    eviction: str = "lru"
    """Name of the eviction policy, for the device and the host tier."""

    weights: Weights | None = None
    """Initial weights of the `session` policy; None starts without any."""

    hint_share: float = 0.5
    """Share of the device blocks that the hints of one tenant may keep."""

    storage_order: Literal["reuse", "arrival"] = "reuse"
    """Which blocks are written to storage first: those most likely to be used again or, for
    comparisons, those that came first."""

    max_ghosts: int = 32_768
    """Number of runs of evicted blocks that are remembered, to explain misses."""

    max_stored_nodes: int = 65_536
    """Number of runs that are remembered although only storage has them."""

    fingerprint: bytes = b""
    """Content hash of the model's weights and config."""

    kv_format: str = ""
    """Element type and layout version of the KV bytes."""

    shard: str = ""
    """The part of the model's heads or layers that this cache is for."""

    record_events: bool = False
    """Whether KV events are recorded for consumers."""

    record_host: bool = False
    """Whether arrivals in host slots are recorded, for a host tier that outlives the engine."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "select_hits"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in (
            "device_blocks",
            "host_blocks",
            "max_ghosts",
            "max_stored_nodes",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} cannot be negative, got {getattr(self, name)}")
        if self.write_ahead_blocks is not None and self.write_ahead_blocks < 1:
            raise ConfigError(
                f"write_ahead_blocks must be positive, got {self.write_ahead_blocks}"
            )
        if self.weights is not None and self.eviction != "session":
            raise ConfigError(
                f"weights need the session policy, but the policy is {self.eviction}; leave weights out"
            )
        if not 0.0 <= self.hint_share <= 1.0:
            raise ConfigError(f"hint_share must be between 0 and 1, got {self.hint_share}")
        if not isinstance(self.write_policy, WritePolicy):
            raise ConfigError(f"write_policy must be a WritePolicy, got {self.write_policy!r}")
        if self.eviction not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise ConfigError(f"unknown eviction policy {self.eviction!r}; known: {known}")
        if self.storage and not self.host_blocks:
            raise ConfigError(
                "a storage tier needs a host tier to pass through: set host_blocks"
            )
