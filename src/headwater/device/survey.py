"""What a model needs and how it would be served, from its files, without torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.device.budget import StepShape, intermediate_size
from headwater.device.families import ALIASES, NOT_FUSED, check_served, max_positions
from headwater.device.model_files import (
    StoredTensor,
    read_config,
    stored_tensors,
    weight_files,
)
from headwater.device.quantization.schemes import BESIDE_SUFFIXES, MAIN_SUFFIXES
from headwater.errors import ConfigError, ModelError
from headwater.transfer.layout import KVLayout

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LAYERS = ("num_hidden_layers", "num_layers")
_REQUIRED = ("num_attention_heads", "hidden_size", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSurvey:
    """One model folder, as described by its files."""

    folder: Path
    config: Mapping[str, Any]
    dtype: str
    """Type of weights and KV when served."""

    tensors: tuple[StoredTensor, ...]
    num_files: int
    has_fp8_kv: bool = False

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def num_layers(self) -> int:
        """Layers with their own KV. LongCat's config counts its layers in pairs."""
        named = self.config.get("num_hidden_layers")
        return int(named if named is not None else 2 * self.config["num_layers"])

    @property
    def is_fused(self) -> bool:
        """Whether a GPU runs it in the fused decoder and captured graphs."""
        return ALIASES.get(self.model_type, self.model_type) not in NOT_FUSED

    @property
    def quantization(self) -> str | None:
        """How the weights are stored, if they are quantised."""
        settings = self.config.get("quantization_config")
        return str(settings.get("quant_method")) if isinstance(settings, Mapping) else None

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in the types in which they would be served."""
        return sum(self._served_bytes(tensor) for tensor in self.tensors)

    @property
    def max_model_len(self) -> int:
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        return max_positions(self.config, rope)

    def layout(self, block_tokens: int) -> KVLayout:
        """The layout of a block."""
        heads = int(self.config["num_attention_heads"])
        kv_heads = int(self.config.get("num_key_value_heads") or heads)
        head_dim = int(self.config.get("head_dim") or self.config["hidden_size"] // heads)
        planes = 2
        if (rank := self.config.get("kv_lora_rank")) is not None:
            kv_heads, head_dim, planes = 1, rank + int(self.config["qk_rope_head_dim"]), 1
        return KVLayout(
            num_layers=self.num_layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_tokens=block_tokens,
            planes=planes,
            dtype=f"{self.dtype}-fp8_e4m3" if self.has_fp8_kv else self.dtype,
            element_bytes=1 if self.has_fp8_kv else _DTYPE_BYTES[self.dtype],
            scale_bytes=1 if self.has_fp8_kv else 0,
        )

    def step_shape(self) -> StepShape:
        """What determines the memory of a step."""
        layout = self.layout(1)
        heads = int(self.config["num_attention_heads"])
        return StepShape(
            hidden_size=int(self.config["hidden_size"]),
            intermediate_size=intermediate_size(self.config),
            packed_size=(heads + 2 * layout.kv_heads) * layout.head_dim,
            vocab_size=int(self.config["vocab_size"]),
            element_bytes=_DTYPE_BYTES[self.dtype],
        )

    def _served_bytes(self, tensor: StoredTensor) -> int:
        width = _DTYPE_BYTES[self.dtype]
        # Quantised weights are counted as dequantised, as on a CPU.
        if self.quantization is not None and tensor.name.endswith(BESIDE_SUFFIXES):
            return 0
        if tensor.kind in _STORED_DTYPES or tensor.kind == "F8_E4M3":
            return tensor.num_elements * width
        if self.quantization is not None and tensor.name.endswith(tuple(MAIN_SUFFIXES)):
            return 8 * tensor.num_elements * width
        if self.quantization == "mxfp4":
            # Dequantised when loaded: a byte holds two elements, and scales disappear.
            return tensor.num_bytes * 2 * width if tensor.name.endswith("_blocks") else 0
        return tensor.num_bytes


def survey(folder: Path, dtype: str = "auto") -> ModelSurvey:
    """Read a folder with weights. Raises ModelError with the reason if its model would be
    refused."""
    check_served(read_config(folder))
    files = weight_files(folder)
    tensors = [tensor for file in files for tensor in stored_tensors(file)]
    return survey_of(folder, dtype, tensors, len(files))


def survey_of(
    folder: Path, dtype: str, tensors: Sequence[StoredTensor], num_files: int
) -> ModelSurvey:
    """The survey of a folder whose tensors, in this many files, are already known."""
    config = read_config(folder)
    check_served(config)
    for name in _REQUIRED:
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise ModelError(
                f"{name} in {folder / 'config.json'} must be a positive whole number, got "
                f"{config.get(name)!r}"
            )
    if not any(isinstance(config.get(name), int) for name in _LAYERS):
        raise ModelError(
            f"{_LAYERS[0]} in {folder / 'config.json'} must be a whole number, got "
            f"{config.get(_LAYERS[0])!r}"
        )
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json; use a complete model folder")
    return ModelSurvey(
        folder=folder,
        config=config,
        dtype=_dtype(dtype, config, tensors),
        tensors=tuple(tensors),
        num_files=num_files,
    )


def _dtype(asked: str, config: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> str:
    """The type of weights and KV: the requested one, otherwise that of the config, otherwise
    that of most weights."""
    if asked == "auto":
        named = config.get("dtype") or config.get("torch_dtype")
        kinds = Counter(tensor.kind for tensor in tensors if tensor.kind in _STORED_DTYPES)
        most = kinds.most_common(1)[0][0] if kinds else "F32"
        asked = str(named or _STORED_DTYPES[most]).removeprefix("torch.")
    if asked not in _DTYPE_BYTES:
        known = ", ".join(_DTYPE_BYTES)
        raise ConfigError(f"unknown dtype '{asked}'; known: auto, {known}")
    return asked
