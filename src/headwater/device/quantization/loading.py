"""Makes a transformers model from quantised weights.

On a CPU every weight is dequantised to the serving dtype. On a GPU linear layers, and experts in
FP8, keep their stored format; formats without a kernel are dequantised there too. transformers
gets the weights under the names of a plain model, so it still joins experts and ties embeddings
itself. For a weight that is kept, it gets a placeholder of one element; kept experts are joined
before.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from headwater.device.families import ALIASES
from headwater.device.quantization.checkpoint import QuantizedCheckpoint
from headwater.device.quantization.expert_names import expert_layers
from headwater.device.quantization.matrices import QuantizedMatrix
from headwater.device.quantization.schemes import Quantization
from headwater.device.transformers_config import transformers_config
from headwater.errors import ModelError

if TYPE_CHECKING:
    from headwater.device.gpu.fp8_experts import Fp8Experts

_log = logging.getLogger(__name__)

_PLAIN_EXPERTS = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "minimax_m2"),
        *("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open"),
    }
)
"""Families whose experts have gate, up and down, and nothing else."""


def load_quantized(
    folder: Path,
    quantization: Quantization,
    dtype: torch.dtype | str,
    *,
    kept_on: torch.device | None,
    **loading: object,
) -> tuple[Any, Any]:
    """A model, and transformers' report about its loading.

    `kept_on` is the GPU on which weights keep their stored format; None dequantises all of
    them.
    """
    config = plain_config(folder)
    target = serving_dtype(config, dtype)
    checkpoint = QuantizedCheckpoint(folder, quantization)
    state = dict(checkpoint.plain())
    kept: dict[str, QuantizedMatrix] = {}
    experts: dict[str, Fp8Experts] = {}
    done: set[str] = set()
    if kept_on is not None:
        experts, done = _kept_experts(checkpoint, config, target, kept_on)
    for name, each in experts.items():
        for part, weight in (("gate_up_proj", each.gate_up), ("down_proj", each.down)):
            placeholder = torch.zeros(1, dtype=target)
            state[f"{name}.{part}"] = placeholder.expand(weight.codes.shape)
    # Latent KV is computed from plain weights.
    has_latents = getattr(config, "kv_lora_rank", None) is not None
    for layer in checkpoint.layers:
        if layer in done:
            continue
        matrix = checkpoint.matrix(layer)
        if kept_on is not None and not has_latents and _is_kept(layer, matrix):
            kept[layer] = matrix.to(kept_on)
            state[f"{layer}.weight"] = torch.zeros(1, dtype=target).expand(matrix.shape)
        else:
            state[f"{layer}.weight"] = matrix.dequantize(target)
    _log.info(
        "quantised weights are %s: method=%s layers=%d kept=%d dtype=%s",
        "kept" if kept or experts else "dequantised at load",
        quantization.method, len(checkpoint.layers), len(kept) + len(done), target,
    )  # fmt: skip
    module, found = model_from(state, config, dtype=target, **loading)
    for layer, matrix in kept.items():
        _replace(module, layer, matrix, target)
    for name, each in experts.items():
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, each)
    return module, found


def _kept_experts(
    checkpoint: QuantizedCheckpoint,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[str, "Fp8Experts"], set[str]]:
    """Experts that keep their format on `device`, by the name of their module, and the layers
    of the files that they consist of. Both are empty if the kernels and dequantised weights give
    different results for the first experts."""
    model_type = str(config.model_type)
    groups = expert_layers(checkpoint.layers)
    is_plain = ALIASES.get(model_type, model_type) in _PLAIN_EXPERTS
    if not groups or not is_plain or getattr(config, "hidden_act", "silu") != "silu":
        return {}, set()
    from headwater.device.gpu.fp8_experts import fault_of, fp8_experts
    from headwater.device.gpu.kernel_cache import use_kernel_cache

    use_kernel_cache(device)
    kept: dict[str, Fp8Experts] = {}
    done: set[str] = set()
    for group in groups:
        experts = fp8_experts(group, checkpoint.matrix, device)
        if experts is None:
            continue
        if not kept:
            fault = fault_of(experts, int(config.num_experts_per_tok), dtype)
            if fault is not None:
                _log.warning("experts are dequantised: their FP8 kernels failed: %s", fault)
                return {}, set()
        kept[group.module] = experts
        done |= set(group.names)
    return kept, done


def _is_kept(layer: str, matrix: QuantizedMatrix) -> bool:
    # Triton is installed only with GPU support
    from headwater.device.gpu.quantized import can_stay

    return ".experts." not in layer and can_stay(matrix)


def _replace(module: nn.Module, name: str, matrix: QuantizedMatrix, dtype: torch.dtype) -> None:
    """Replace a linear layer by a quantised one."""
    from headwater.device.gpu.quantized import QuantizedLinear, quantized_weight

    parent, _, own = name.rpartition(".")
    plain: Any = module.get_submodule(name)
    if not isinstance(plain, nn.Linear):
        raise ModelError(f"{name} is quantised, but only linear layers can be quantised")
    found: Any = plain.bias
    bias = None if found is None else found.data.to(matrix.codes.device)
    quantized = QuantizedLinear(quantized_weight(matrix, dtype), bias)
    setattr(module.get_submodule(parent), own, quantized)


def plain_config(folder: Path) -> PretrainedConfig:
    """The folder's config without its quantisation."""
    config: Any = transformers_config(folder)
    del config.quantization_config
    return config  # type: ignore[no-any-return]  # seen above


def serving_dtype(config: PretrainedConfig, asked: torch.dtype | str) -> torch.dtype:
    """The requested dtype, otherwise that of the config, otherwise bfloat16."""
    if isinstance(asked, torch.dtype):
        return asked
    named = getattr(config, "dtype", None)
    return named if isinstance(named, torch.dtype) else torch.bfloat16


def model_from(
    state: dict[str, Tensor], config: PretrainedConfig, **loading: object
) -> tuple[Any, Any]:
    """A transformers model of these weights, and the report about its loading."""
    loader: Any = AutoModelForCausalLM
    kind = loader._model_mapping[type(config)]
    made, found = kind.from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, **loading
    )
    return made, found
