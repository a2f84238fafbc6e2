"""Reads `quantization_config` of a model's config.json: how its linear layers are stored.

The package `compressed-tensors` parses its own configurations; the other ones are read here. A
scheme that is not supported is refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headwater.errors import ConfigError, ModelError

METHODS = ("fp8", "compressed-tensors", "awq", "gptq", "mxfp4")
"""Every `quant_method` that is served."""


class Storage(StrEnum):
    """The tensors in which a linear layer is stored."""

    FP8 = "fp8"
    PACKED = "pack-quantized"
    GPTQ = "gptq"
    AWQ = "awq"


MAIN_SUFFIXES = {".weight_packed": Storage.PACKED, ".qweight": Storage.GPTQ}
"""How a layer is stored, by the suffix of its main tensor. AWQ's suffix is the same as GPTQ's;
an e4m3 `.weight` is fp8."""

BESIDE_SUFFIXES = (
    *(".weight_scale", ".weight_scale_inv", ".weight_shape", ".weight_zero_point"),
    *(".weight_g_idx", ".input_scale", ".input_zero_point", ".qzeros", ".scales", ".g_idx"),
    *(".k_scale", ".v_scale", ".output_scale"),
)
"""Further tensors of a layer that a plain model does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the weights of some linear layers are quantised."""

    storage: Storage
    targets: tuple[str, ...] = ("Linear",)
    """Names of modules, `re:` patterns, or `Linear` for all."""

    group_size: int | None = None
    """Inputs that share a scale; None means a whole row."""

    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, if both are limited."""

    has_zeros: bool = False
    """Whether groups have zero points of their own."""

    zero_offset: int = 0
    """Value added to a stored zero point: the first GPTQ format stores one less."""

    def covers(self, module: str) -> bool:
        """Whether a module of this name has this scheme."""
        return any(_matches(target, module) for target in self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How a model's weights are stored."""

    method: str
    schemes: tuple[Scheme, ...]

    def scheme_of(self, module: str, storage: Storage) -> Scheme | None:
        """The scheme of a layer with this storage; None if the config has none."""
        for scheme in self.schemes:
            if scheme.storage is storage and scheme.covers(module):
                return scheme
        return None


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether the experts are stored in GPT-OSS's published format."""
    return _method(config) == "mxfp4"


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """The model's quantisation; None if its weights are plain. Raises ModelError for what is
    not supported."""
    method = _method(config)
    if method is None or method == "mxfp4":
        return None
    read = {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "awq": _awq,
        "gptq": _gptq,
    }.get(method)
    if read is None:
        raise ModelError(
            f"weights quantised with '{method}' are not served; served are {', '.join(METHODS)}"
        )
    return Quantization(method=method, schemes=read(config["quantization_config"]))


def _method(config: Mapping[str, Any]) -> str | None:
    settings = config.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(method, str):
        raise ModelError("quantization_config of config.json names no quant_method")
    return method


def _fp8(settings: Mapping[str, Any]) -> tuple[Scheme, ...]:
    size = settings.get("weight_block_size")
    if size is None:
        return (Scheme(storage=Storage.FP8),)
    if not _are_positive(size) or len(size) != 2:
        raise ModelError(
            f"quantization_config: weight_block_size must be two positive numbers, got {size!r}"
        )
    return (Scheme(storage=Storage.FP8, block=(size[0], size[1])),)


def _awq(settings: Mapping[str, Any]) -> tuple[Scheme, ...]:
    _want_4_bits("awq", settings)
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError(f"awq weights in version '{version}' are not served, only 'gemm'")
    return (
        Scheme(storage=Storage.AWQ, group_size=_group_size("awq", settings), has_zeros=True),
    )


def _gptq(settings: Mapping[str, Any]) -> tuple[Scheme, ...]:
    _want_4_bits("gptq", settings)
    if settings.get("dynamic"):
        raise ModelError("gptq weights with 'dynamic' rules for single layers are not served")
    form = settings.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"gptq weights with checkpoint_format '{form}' are not served, only 'gptq' and "
            "'gptq_v2'"
        )
    return (
        Scheme(
            storage=Storage.GPTQ,
            group_size=_group_size("gptq", settings),
            has_zeros=True,
            zero_offset=1 if form == "gptq" else 0,
        ),
    )


def _want_4_bits(method: str, settings: Mapping[str, Any]) -> None:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise ModelError(f"{method} weights of {bits!r} bits are not served, only of 4 bits")


def _group_size(method: str, settings: Mapping[str, Any]) -> int | None:
    size = settings.get("group_size", settings.get("q_group_size"))
    if size == -1:
        return None
    if not _are_positive([size]):
        raise ModelError(
            f"quantization_config: group_size of {method} must be positive or -1, got {size!r}"
        )
    return int(size)


def _are_positive(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and n > 0 for n in numbers)


def _compressed_tensors(settings: Mapping[str, Any]) -> tuple[Scheme, ...]:
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"weights of compressed-tensors need the package {exc.name!r}; "
            "try: pip install 'headwater[engine]'"
        ) from exc
    if settings.get("sparsity_config") and settings["sparsity_config"].get("format") not in (
        None,
        "dense",
    ):
        raise ModelError("sparse weights of compressed-tensors are not served, only dense ones")
    try:
        parsed = QuantizationConfig.model_validate(settings)
    except (ValueError, TypeError, KeyError) as exc:
        first = str(exc).replace("\n", " ")[:300]
        raise ModelError(f"quantization_config cannot be read: {first}") from exc
    groups: dict[str, Any] = dict(parsed.config_groups)
    if not groups:
        raise ModelError("quantization_config has no config_groups")
    return tuple(
        _group_scheme(name, group, str(group.format or parsed.format))
        for name, group in groups.items()
    )


def _group_scheme(name: str, group: Any, form: str) -> Scheme:  # noqa: ANN401 - compressed-tensors' own
    weights = group.weights
    if weights is None:
        raise ModelError(f"quantization_config: {name} quantises no weights; leave it out")
    kind = f"{getattr(weights.type, 'value', weights.type)}{weights.num_bits}"
    form = form.removeprefix("CompressionFormat.").replace("_", "-")
    strategy = str(getattr(weights.strategy, "value", weights.strategy))
    targets = tuple(group.targets)
    if kind == "float8" and form in ("float-quantized", "naive-quantized", "dense"):
        if strategy in ("tensor", "channel"):
            return Scheme(storage=Storage.FP8, targets=targets)
        if strategy == "block" and weights.block_structure:
            block = tuple(int(size) for size in weights.block_structure)
            return Scheme(storage=Storage.FP8, targets=targets, block=(block[0], block[1]))
    if kind == "int4" and form == "pack-quantized" and strategy in ("group", "channel"):
        return Scheme(
            storage=Storage.PACKED,
            targets=targets,
            group_size=weights.group_size if strategy == "group" else None,
            has_zeros=not weights.symmetric,
        )
    raise ModelError(
        f"quantization_config: {name} is '{form}' with {kind} weights by {strategy}, which is not "
        "served; served: float8 by tensor, channel or block, and int4 pack-quantized"
    )


def _matches(target: str, module: str) -> bool:
    if target == "Linear":
        return True
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return module == target or module.endswith("." + target)
