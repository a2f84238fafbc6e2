"""Loads a model folder: transformers' model code, our attention, local files only."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar
from transformers.utils.quantization_config import Mxfp4Config

from headwater.device import builtin, packing
from headwater.device.attention.base import ATTENTION, register
from headwater.device.families import check_served, max_positions
from headwater.device.fingerprint import fingerprint, identity_files
from headwater.device.latent import use_latents
from headwater.device.model_files import read_config, read_object
from headwater.device.parallel.sharding import split
from headwater.device.parallel.share import RankShare
from headwater.device.quantization.checkpoint import check_plain
from headwater.device.quantization.loading import load_quantized
from headwater.device.quantization.mxfp4 import check_mxfp4, load_packed
from headwater.device.quantization.schemes import is_mxfp4, quantization_of
from headwater.device.transformers_config import LOCAL, transformers_config
from headwater.errors import ConfigError, ModelError
from headwater.transfer.layout import KVLayout

_log = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A loaded model and its properties."""

    module: nn.Module
    model_dir: Path
    fingerprint: bytes
    """Empty on ranks other than the first."""

    device: torch.device
    dtype: torch.dtype
    num_layers: int
    kv_heads: int
    """KV heads on this rank."""

    head_dim: int
    vocab_size: int
    max_model_len: int
    """Maximum number of tokens of prompt and output together."""

    eos_token_ids: tuple[int, ...]
    min_rows: int = 1
    """Smaller steps are padded to this many tokens, because they are faster that way."""

    planes: int = 2
    """2 for keys and values; 1 if one latent is stored for both (MLA)."""

    value_dim: int | None = None
    """Number of leading elements of a stored latent that are the value; None if the value is
    the whole head."""

    has_fp8_kv: bool = False
    """Whether KV is stored in 8 bits, with a scale for each token and head."""

    share: RankShare | None = None
    """The part of the weights on this rank; None means all of them."""

    total_kv_heads: int = 0
    """KV heads of the whole model; 0 means the same number as on this rank."""

    def layout(self, block_tokens: int) -> KVLayout:
        """The layout of a block on this rank, with its KV heads."""
        dtype = str(self.dtype).removeprefix("torch.")
        return KVLayout(
            num_layers=self.num_layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            # KV rounded from two dtypes differs, so both are part of the format.
            dtype=f"{dtype}-fp8_e4m3" if self.has_fp8_kv else dtype,
            planes=self.planes,
            element_bytes=1 if self.has_fp8_kv else self.dtype.itemsize,
            scale_bytes=1 if self.has_fp8_kv else 0,
        )

    def whole_layout(self, block_tokens: int) -> KVLayout:
        """The layout of a block in lower tiers and on links, whatever the number of ranks."""
        own = self.layout(block_tokens)
        return replace(own, kv_heads=self.total_kv_heads or self.kv_heads)

    @property
    def token_bytes(self) -> int:
        """KV of one token over all layers."""
        return self.layout(1).block_bytes


def load(
    model_dir: str | Path | None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    packed: bool = True,
    has_fp8_kv: bool = False,
    share: RankShare | None = None,
) -> LoadedModel:
    """Load `model_dir`, or the built-in tiny model for None. Raises ModelError with the reason.

    `packed` allows a CPU model's weights to be reordered for speed. With a `share`, only that
    part of the weights is kept; the model cannot be used before `connect`. Nothing is
    downloaded, and no code from the folder is run.
    """
    target = _torch_device(device)
    folder = Path(model_dir) if model_dir is not None else builtin.ensure()
    raw = read_config(folder)
    check_served(raw)
    ends = _generation_ends(folder)
    identity_files(folder)
    # Ranks split plain weights only.
    kept_on = target if target.type == "cuda" and share is None else None
    with ThreadPoolExecutor(1) as hashing:
        # Reading all weights for their hash takes as long as loading them, so it runs on
        # another core. One rank is enough, because the others compute no block keys.
        is_named = share is None or share.is_first
        name = hashing.submit(fingerprint if is_named else _unnamed, folder)
        loaded = _load_module(folder, raw, _torch_dtype(dtype), kept_on)
    module: nn.Module = loaded
    sizes = _sizes(loaded.config)
    if share is not None:
        split(module, share)
        start, end = share.kv_heads(sizes["total_kv_heads"])
        sizes["kv_heads"] = end - start
    use_latents(module)
    _move(module, target)
    module.eval()
    if packed:
        packing.pack(module)
    return LoadedModel(
        module=module,
        fingerprint=name.result(),
        model_dir=folder,
        device=target,
        min_rows=packing.min_rows(module),
        eos_token_ids=_config_ends(loaded.config, folder) if ends is None else ends,
        has_fp8_kv=has_fp8_kv,
        share=share,
        **sizes,
    )


def _unnamed(folder: Path) -> bytes:
    """An empty fingerprint, for ranks that compute no block keys."""
    return b""


def _torch_dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return name
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype '{name}'; known: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _torch_device(name: str) -> torch.device:
    """The device, after a test allocation. Raises ConfigError with the reason if it failed."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as exc:
        raise ConfigError(f"device '{name}' cannot be used: {_first_line(exc)}") from exc
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{name}' is not supported; use cpu, cuda or cuda:N")
    return device


def _move(module: nn.Module, device: torch.device) -> None:
    """Move weights away from the mapped files. Mapped weights would change, or end the process,
    when a file is rewritten."""
    if device.type == "cpu":
        for weight in module.parameters():
            weight.data = weight.data.clone()
        return
    try:
        module.to(device)
    except torch.OutOfMemoryError as exc:
        size = sum(weight.nbytes for weight in module.parameters()) / (1 << 30)
        raise ConfigError(
            f"the model's weights take {size:.1f} GiB, which is more than is free on {device}; use "
            "another device, or split the model with --tensor-parallel-size"
        ) from exc


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _load_module(
    folder: Path,
    raw: Mapping[str, Any],
    dtype: torch.dtype | str,
    kept_on: torch.device | None,
) -> PreTrainedModel:
    register()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own
    try:
        module, found = _loaded(folder, raw, dtype, kept_on)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as exc:
        raise ModelError(f"{folder} could not be loaded: {exc}") from exc
    _check_complete(folder, found)
    for weight in module.parameters():
        # Weights that were quantised get a dtype that the quantiser chose.
        weight.data = weight.data.to(module.config.dtype)
    return cast(PreTrainedModel, module)


def _loaded(
    folder: Path,
    raw: Mapping[str, Any],
    dtype: torch.dtype | str,
    kept_on: torch.device | None,
) -> tuple[Any, Mapping[str, Any]]:
    """The module, and transformers' report about its loading."""
    quantization = quantization_of(raw)
    if quantization is not None:
        return load_quantized(
            folder, quantization, dtype, kept_on=kept_on, attn_implementation=ATTENTION
        )
    whole = {"quantization_config": Mxfp4Config(dequantize=True)}
    if is_mxfp4(raw):
        check_mxfp4(folder)
        if kept_on is not None:
            return load_packed(folder, dtype, kept_on, attn_implementation=ATTENTION)
    else:
        whole = {}
        check_plain(folder)
    loader: Any = AutoModelForCausalLM
    module, found = loader.from_pretrained(
        folder,
        config=transformers_config(folder),
        dtype=dtype,
        attn_implementation=ATTENTION,
        use_safetensors=True,
        output_loading_info=True,
        **LOCAL,
        **whole,
    )
    return module, found


def _check_complete(folder: Path, found: Mapping[str, Any]) -> None:
    """Raise ModelError if the folder lacks weights: transformers would make them random, with
    only a warning."""
    for fault in ("missing_keys", "mismatched_keys"):
        if found.get(fault):
            first = sorted(map(str, found[fault]))[0]
            what = fault.removesuffix("_keys")
            count = len(found[fault])
            raise ModelError(
                f"{folder}: {count} weights are {what}, the first is {first}; download the model again"
            )


def _sizes(config: PretrainedConfig) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    positions = max_positions(config.to_dict(), rope)
    if positions < config.max_position_embeddings:
        _log.warning(
            "sequences are limited to %d tokens: a longer one would change the rotary "
            "embedding of all others",
            positions,
        )
    return {
        "dtype": cast(torch.dtype, config.dtype),
        "num_layers": config.num_hidden_layers,
        **kv_shape(config),
        "vocab_size": config.vocab_size,
        "max_model_len": positions,
    }


def kv_shape(config: PretrainedConfig) -> dict[str, Any]:
    """Heads, head size and planes of the stored KV."""
    if (rank := getattr(config, "kv_lora_rank", None)) is not None:
        shape = {"kv_heads": 1, "total_kv_heads": 1, "planes": 1, "value_dim": rank}
        return {**shape, "head_dim": rank + config.qk_rope_head_dim}
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {
        "kv_heads": kv_heads,
        "total_kv_heads": kv_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _generation_ends(folder: Path) -> tuple[int, ...] | None:
    """Ids that end a sequence, from the generation config of the folder if it has any."""
    path = folder / "generation_config.json"
    named = read_object(path).get("eos_token_id") if path.is_file() else None
    return None if named is None else _token_ids(named, path)


def _config_ends(config: PretrainedConfig, folder: Path) -> tuple[int, ...]:
    """End ids from the model's own config."""
    named = config.eos_token_id
    return () if named is None else _token_ids(named, folder / "config.json")


def _token_ids(named: object, path: Path) -> tuple[int, ...]:
    """One id or a list of ids, as in config files."""
    ids = named if isinstance(named, list) else [named]
    for token in ids:
        if type(token) is not int or token < 0:
            raise ModelError(
                f"{path}: eos_token_id must be a token id or a list of them, got {named!r}"
            )
    return tuple(ids)
