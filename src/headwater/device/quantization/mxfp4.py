"""GPT-OSS's experts in MXFP4: always checked, and kept packed on a GPU.

`experts.NAME_blocks` holds bytes of shape `[experts, outputs, groups, 16]`;
`experts.NAME_scales` holds an exponent for each group of 32 inputs.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from headwater.device.model_files import StoredTensor, stored_tensors, weight_files
from headwater.device.quantization.loading import model_from, plain_config, serving_dtype
from headwater.errors import ModelError

_log = logging.getLogger(__name__)

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP_BYTES = 16


def check_mxfp4(folder: Path) -> None:
    """Raises ModelError with the name of the first tensor that does not fit."""
    tensors = {t.name: t for path in weight_files(folder) for t in stored_tensors(path)}
    blocks = [name for name in tensors if name.endswith(_BLOCKS)]
    if not blocks:
        raise ModelError(f"{folder} has quant_method 'mxfp4', but no tensor named *{_BLOCKS}")
    for name in blocks:
        _check_pair(tensors[name], tensors.get(name.removesuffix(_BLOCKS) + _SCALES))


def _check_pair(blocks: StoredTensor, scales: StoredTensor | None) -> None:
    if scales is None:
        raise ModelError(f"{blocks.name} has no tensor with its scales")
    is_whole = len(blocks.shape) == 4 and blocks.shape[3] == _GROUP_BYTES
    if not is_whole or blocks.kind != "U8":
        raise ModelError(
            f"{blocks.name} must be bytes of the shape [experts, outputs, groups, {_GROUP_BYTES}], "
            f"got {blocks.kind} of {blocks.shape}"
        )
    if scales.shape != blocks.shape[:3] or scales.kind != "U8":
        raise ModelError(
            f"{scales.name} must be bytes of the shape {blocks.shape[:3]} to fit {blocks.name}, got "
            f"{scales.kind} of {scales.shape}"
        )


def load_packed(
    folder: Path, dtype: torch.dtype | str, device: torch.device, **loading: object
) -> tuple[Any, Any]:
    """A model whose experts stay packed on `device`, and the report about its loading."""
    config = plain_config(folder)
    target = serving_dtype(config, dtype)
    state: dict[str, Tensor] = {}
    packed: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                kept = name.endswith((_BLOCKS, _SCALES))
                tensor = file.get_tensor(name)
                (packed if kept else state)[name] = tensor.to(device) if kept else tensor
    for name, blocks in packed.items():
        if name.endswith(_BLOCKS):
            experts, outputs, groups, _ = blocks.shape
            shape = experts, groups * 2 * _GROUP_BYTES, outputs
            state[name.removesuffix(_BLOCKS)] = torch.zeros(1, dtype=target).expand(shape)
    module, found = model_from(state, config, dtype=target, **loading)
    for name in {name.rpartition(".")[0] for name in packed}:
        _replace(module, name, packed)
    _log.info("experts are kept in MXFP4: tensors=%d dtype=%s", len(packed), target)
    return module, found


def _replace(module: nn.Module, name: str, packed: dict[str, Tensor]) -> None:
    from headwater.device.gpu.packed_experts import PackedExperts, packed_weight

    gate_up, down = (
        packed_weight(
            packed.pop(f"{name}.{part}{_BLOCKS}"), packed.pop(f"{name}.{part}{_SCALES}")
        )
        for part in ("gate_up_proj", "down_proj")
    )
    parent, _, own = name.rpartition(".")
    replaced = PackedExperts(module.get_submodule(name), gate_up, down)
    setattr(module.get_submodule(parent), own, replaced)
