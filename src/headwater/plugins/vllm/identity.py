"""The identity of vLLM's blocks, from its own configuration."""

import json
import os
from typing import Any

from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

from headwater.errors import ConfigError
from headwater.plugins.identity import BlockIdentity, identify_weights
from headwater.plugins.settings import PluginConfig

HASH_BYTES = 32
"""Length of vLLM's SHA-256. Its xxhash is shorter, and two prompts with the same hash can be
constructed."""


def identify_offload(config: Any, settings: PluginConfig, version: str) -> BlockIdentity:  # noqa: ANN401 - vLLM's OffloadingConfig
    """The identity of the rows of vLLM's primary tier, which hold the bytes of all ranks."""
    sizes = config.parallel
    groups = ";".join(
        f"{group.group_id}:{group.tokens_per_block}:{','.join(group.layer_names)}"
        for group in config.groups
    )
    return BlockIdentity(
        engine=f"vllm {version} tier",
        weights=identify_weights(config.model.name, None, _named(config.model.name, settings)),
        dtype=str(config.model.dtype),
        layout=(
            f"{config.kv_cache_layout} {config.worker_kv_bytes_per_block} "
            f"canonical={config.canonical_layout} replicated={config.replicated_layout} {groups}"
        ),
        shard=(
            f"all ranks of world {sizes.world_size} tp {sizes.tp_size} pp {sizes.pp_size} "
            f"pcp {sizes.pcp_size} dcp {sizes.dcp_size}"
        ),
        block_tokens=f"{config.cache.tokens_per_hash} x {config.cache.blocks_per_chunk}",
        hashing=f"seed {_hash_seed()}",
    )


def identify_worker(
    vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
    layer_names: list[str],
    pages: str,
    rank: int,
    settings: PluginConfig,
    version: str,
) -> BlockIdentity:
    """The identity of the blocks of one worker."""
    model, sizes, cache = (
        vllm_config.model_config,
        vllm_config.parallel_config,
        vllm_config.cache_config,
    )
    if vllm_config.lora_config is not None and settings.adapters != "named":
        raise ConfigError(
            "vLLM tells LoRA adapters apart by name only, and another server may have other "
            'weights under the same name; set "adapters": "named" if names are unique'
        )
    algorithm = str(cache.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256"):
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm} is not collision resistant; use sha256"
        )
    dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    weights = identify_weights(model.model, model.revision, settings.weights)
    return BlockIdentity(
        engine=f"vllm {version} connector",
        weights=f"{weights} {_computation(model)}",
        dtype=str(dtype).removeprefix("torch."),
        layout=f"{pages} of {','.join(layer_names)} by {cache.kv_cache_layout} "
        f"for {_kernels(vllm_config, layer_names)}",
        shard=(
            f"rank {rank} of world {sizes.world_size} tp {sizes.tensor_parallel_size} "
            f"pp {sizes.pipeline_parallel_size} dcp {sizes.decode_context_parallel_size} "
            f"interleave {sizes.cp_kv_cache_interleave_size}"
        ),
        block_tokens=str(cache.block_size),
        hashing=f"{algorithm} seed {_hash_seed()}",
    )


def _computation(model: Any) -> str:  # noqa: ANN401 - vLLM's ModelConfig
    """Settings with which the same weights give other values."""
    overrides = model.hf_overrides
    if callable(overrides):
        raise ConfigError(
            "hf_overrides is a function, so it is not known what the model computes; give a "
            "dictionary"
        )
    rope = json.dumps(getattr(model.hf_text_config, "rope_parameters", None), default=str)
    settings = {
        "dtype": model.dtype,
        "quantization": model.quantization,
        "overrides": overrides,
        # vLLM chooses between the factors of LongRoPE by the longest allowed request.
        "max_model_len": model.max_model_len if "longrope" in rope else None,
    }
    return json.dumps(settings, sort_keys=True, default=str)


def _kernels(vllm_config: Any, layer_names: list[str]) -> str:  # noqa: ANN401 - vLLM's
    """The attention kernels. Each may arrange the bytes of a page in its own way: on a CPU with AMX
    vLLM packs keys in another way than on a CPU without, in pages of the same shape."""
    layers = vllm_config.compilation_config.static_forward_context
    kinds = {
        f"{layers[name].get_attn_backend().get_name()} {getattr(layers[name], 'isa', '')}"
        for name in layer_names
    }
    return ", ".join(sorted(kinds))


def _hash_seed() -> str:
    """The first value of vLLM's chain of block hashes."""
    return os.environ.get("PYTHONHASHSEED") or str(DEFAULT_NONE_HASH_SEED)


def _named(model: str, settings: PluginConfig) -> str | None:
    """The operator's name for the weights; needed if a tier knows only the model's name."""
    if settings.weights is None and not os.path.isdir(model):
        raise ConfigError(
            f"vLLM does not pass the revision of {model!r} to a secondary tier; serve a "
            'local directory, or set "weights" to its commit in the settings of the tier'
        )
    return settings.weights
