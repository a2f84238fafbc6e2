"""Makes a transformers model from quantised weights.

On a CPU every weight is turned back to the serving dtype. transformers gets the weights under the
names of a plain model, so what it does to them (joining experts, tying embeddings) stays its own.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from headwater.device.quantization.checkpoint import QuantizedCheckpoint
from headwater.device.quantization.schemes import Quantization
from headwater.device.transformers_config import transformers_config

_log = logging.getLogger(__name__)


def load_dequantized(
    folder: Path, quantization: Quantization, dtype: torch.dtype | str, **loading: object
) -> tuple[Any, Any]:
    """A model with plain weights, and what transformers says about its loading."""
    config = plain_config(folder)
    target = serving_dtype(config, dtype)
    checkpoint = QuantizedCheckpoint(folder, quantization)
    state = dict(checkpoint.plain())
    for layer in checkpoint.layers:
        state[f"{layer}.weight"] = checkpoint.matrix(layer).dequantize(target)
    _log.info(
        "weights are dequantised at load: method=%s layers=%d dtype=%s",
        quantization.method, len(checkpoint.layers), target,
    )  # fmt: skip
    return model_from(state, config, dtype=target, **loading)


def plain_config(folder: Path) -> PretrainedConfig:
    """The folder's config without its quantisation."""
    config: Any = transformers_config(folder)
    del config.quantization_config
    return config  # type: ignore[no-any-return]  # seen above


def serving_dtype(config: PretrainedConfig, asked: torch.dtype | str) -> torch.dtype:
    """The dtype that is asked for, else the config's, else bfloat16."""
    if isinstance(asked, torch.dtype):
        return asked
    named = getattr(config, "dtype", None)
    return named if isinstance(named, torch.dtype) else torch.bfloat16


def model_from(
    state: dict[str, Tensor], config: PretrainedConfig, **loading: object
) -> tuple[Any, Any]:
    """A transformers model of these weights, and what is said about its loading."""
    loader: Any = AutoModelForCausalLM
    kind = loader._model_mapping[type(config)]
    made, found = kind.from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, **loading
    )
    return made, found
