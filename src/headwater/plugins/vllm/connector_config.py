"""Settings of the connector, and the shape of the KV cache."""

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from headwater.errors import ConfigError
from headwater.plugins.settings import PluginConfig
from headwater.plugins.versions import require_tested
from headwater.plugins.vllm.host_tier import HostTierConfig
from headwater.plugins.vllm.identity import identify_worker
from headwater.storage.settings import parse_bytes
from headwater.transfer.slab import slot_bytes

_DEFAULT_HOST_BYTES = 4 << 30
_OWN = ("host_bytes", "eviction")
_WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of attention of which vLLM keeps every block of a request as long as the request runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The one group of KV blocks that the connector moves."""

    layer_names: list[str]
    page_bytes: int
    """Bytes of one block over all layers, as vLLM calculates them."""

    block_tokens: int
    num_blocks: int
    num_ranks: int
    rank: int

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> "KVShape":  # noqa: ANN401 - vLLM's
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(
                f"the model has {len(groups)} groups of KV blocks, and the connector moves one; "
                "use --disable-hybrid-kv-cache-manager, or HeadwaterTier"
            )
        [group], spec = groups, groups[0].kv_cache_spec
        single = type(spec).__name__ == "UniformTypeKVCacheSpecs"
        for one in spec.kv_cache_specs.values() if single else [spec]:
            _require_whole(type(one).__name__)
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        if block_tokens != hash_tokens:
            raise ConfigError(
                f"blocks have {block_tokens} tokens, but vLLM makes a hash for each {hash_tokens} tokens, which the connector does not support; use HeadwaterTier"
            )
        if not vllm_config.cache_config.enable_prefix_caching:
            raise ConfigError("the connector needs vLLM's prefix caching; do not turn it off")
        return cls(
            layer_names=list(group.layer_names),
            page_bytes=spec.page_size_bytes * (1 if single else len(group.layer_names)),
            block_tokens=block_tokens,
            num_blocks=kv_cache_config.num_blocks,
            num_ranks=vllm_config.parallel_config.world_size,
            rank=vllm_config.parallel_config.rank,
        )

    def require_bytes(self, block_bytes: int) -> None:
        """Check that scheduler and workers agree on the size of a slot."""
        if block_bytes > self.page_bytes:
            raise ConfigError(
                f"a KV block has {block_bytes} bytes in the worker, but the scheduler expects at "
                f"most {self.page_bytes}; this layout is not supported, use HeadwaterTier"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """The validated `kv_connector_extra_config`."""

    version: str
    host_bytes: int
    eviction: str
    settings: PluginConfig
    storage: PluginConfig | None
    """None without a storage tier."""

    @classmethod
    def read(cls, transfer: Any) -> "ConnectorConfig":  # noqa: ANN401 - vLLM's KVTransferConfig
        """Read and check the settings. Raises ConfigError with what to change."""
        extra = dict(transfer.kv_connector_extra_config or {})
        own = {name: extra.pop(name) for name in _OWN if name in extra}
        settings = PluginConfig.read(extra, "HeadwaterConnector")
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                'set "kv_load_failure_policy": "recompute": with '
                f"{transfer.kv_load_failure_policy!r} vLLM ends a request with an error when "
                "storage fails"
            )
        has_storage = "backend" in extra or "config" in extra
        return cls(
            version=require_tested("vllm", allow_untested=settings.allow_untested),
            host_bytes=parse_bytes(own.get("host_bytes", _DEFAULT_HOST_BYTES)),
            eviction=own.get("eviction", "session"),
            settings=settings,
            storage=settings if has_storage else None,
        )

    def num_slots(self, shape: KVShape) -> int:
        """Host slots of each rank."""
        count = self.host_bytes // slot_bytes(shape.page_bytes)
        if count < 1:
            raise ConfigError(
                f"host_bytes of {self.host_bytes} is too small for one block of {shape.page_bytes} bytes; "
                "raise it"
            )
        return count

    def host_tier(self, shape: KVShape) -> HostTierConfig:
        """The settings of the scheduler's side."""
        return HostTierConfig(
            num_slots=self.num_slots(shape),
            block_tokens=shape.block_tokens,
            # These keys are used only inside this process; storage has the full identities of
            # the ranks.
            identity=b"scheduler",
            num_ranks=shape.num_ranks,
            eviction=self.eviction,
            has_storage=self.storage is not None,
            lookup_timeout_s=self.settings.lookup_timeout_s,
            max_waiting_writes=self.settings.max_waiting_writes,
        )

    def identify(self, vllm_config: Any, shape: KVShape, pages: str) -> bytes:  # noqa: ANN401 - vLLM's
        """The identity of this rank's blocks, whose layers are laid out as in `pages`."""
        if self.storage is not None and vllm_config.weight_transfer_config is not None:
            raise ConfigError(
                "with weight_transfer_config vLLM changes its weights while it runs, and storage "
                "would still serve blocks of the old ones; leave out backend and config, or "
                "weight_transfer_config"
            )
        return identify_worker(
            vllm_config,
            shape.layer_names,
            pages,
            shape.rank,
            self.settings,
            self.version,
        ).fingerprint()


def _require_whole(kind: str) -> None:
    """Refuse attention whose blocks vLLM takes away or replaces while their request runs."""
    if kind not in _WHOLE:
        raise ConfigError(
            f"the model's KV blocks are of the kind {kind}, and the connector moves those of full "
            "attention only; use HeadwaterTier"
        )
