"""Measures the device and calculates the number of blocks of its KV pool."""

from pathlib import Path
from typing import Any

import torch

from headwater.device.budget import StepShape, blocks_within, free_main_bytes, intermediate_size
from headwater.device.model import LoadedModel
from headwater.errors import ConfigError

_GPUS = Path("/proc/driver/nvidia/gpus")


def num_blocks_that_fit(
    model: LoadedModel,
    *,
    block_tokens: int,
    utilization: float | None = None,
    override: int | None = None,
    available_bytes: int | None = None,
    step_tokens: int = 0,
    max_num_seqs: int = 0,
) -> int:
    """Blocks for the KV pool: `override`, or what `utilization` of the free memory holds.

    `available_bytes` is measured unless it is given. On a GPU the memory of a step with
    `step_tokens` and `max_num_seqs` sequences is left free. Raises ConfigError if not even one
    block fits, or if a setting is invalid.
    """
    if override is not None:
        if override < 1:
            raise ConfigError(
                f"the KV pool needs at least one block, got {override}; raise "
                f"--num-gpu-blocks-override"
            )
        return override
    return blocks_within(
        available_bytes if available_bytes is not None else free_bytes(model),
        device_type=model.device.type,
        block_tokens=block_tokens,
        block_bytes=model.token_bytes * block_tokens,
        utilization=utilization,
        step_bytes=_step_shape(model).num_bytes(step_tokens, max_num_seqs),
    )


def free_bytes(model: LoadedModel) -> int:
    """Free memory of the model's device after the model was loaded."""
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0])
    return free_main_bytes()


def _step_shape(model: LoadedModel) -> StepShape:
    config: Any = model.module.config
    return StepShape(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size(config.to_dict()),
        packed_size=(config.num_attention_heads + 2 * model.kv_heads) * model.head_dim,
        vocab_size=model.vocab_size,
        element_bytes=model.dtype.itemsize,
    )


def num_machine_gpus() -> int:
    """GPUs of this machine, at least 1. Other engines may use GPUs that this one does not
    see."""
    try:
        return max(len(list(_GPUS.iterdir())), 1)
    except OSError:
        return max(torch.cuda.device_count(), 1)
