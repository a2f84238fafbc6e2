"""Makes a transformers model from quantised weights.

On a CPU every weight is dequantised to the serving dtype. On a GPU linear layers keep their
stored format; experts, and formats without a kernel, are dequantised there too. transformers
gets the weights under the names of a plain model, so it still joins experts and ties embeddings
itself. For a weight that is kept, it gets a placeholder of one element.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from headwater.device.quantization.checkpoint import QuantizedCheckpoint
from headwater.device.quantization.matrices import QuantizedMatrix
from headwater.device.quantization.schemes import Quantization
from headwater.device.transformers_config import transformers_config
from headwater.errors import ModelError

_log = logging.getLogger(__name__)


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
    for layer in checkpoint.layers:
        matrix = checkpoint.matrix(layer)
        if kept_on is not None and _is_kept(layer, matrix):
            kept[layer] = matrix.to(kept_on)
            state[f"{layer}.weight"] = torch.zeros(1, dtype=target).expand(matrix.shape)
        else:
            state[f"{layer}.weight"] = matrix.dequantize(target)
    _log.info(
        "quantised weights are %s: method=%s layers=%d kept=%d dtype=%s",
        "kept" if kept else "dequantised at load",
        quantization.method, len(checkpoint.layers), len(kept), target,
    )  # fmt: skip
    module, found = model_from(state, config, dtype=target, **loading)
    for layer, matrix in kept.items():
        _replace(module, layer, matrix, target)
    return module, found


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
