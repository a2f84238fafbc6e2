"""Measures the device, then says how many blocks its KV pool may have."""

from pathlib import Path
from typing import Any

import torch

from headwater.device.model import LoadedModel
from headwater.device.runner import CONTIGUOUS_SHARE
from headwater.errors import ConfigError

_MAX_CPU_BYTES = 4 << 30
"""Pool and buffers take no more main memory than this unless a number is given."""

_WIDE_ROWS = 8192
"""Rows of a large step whose widest activations are in memory at once."""

_MAX_LOGIT_ROWS = 256
_LOGIT_BYTES = 16
"""A logit as the model made it, and its probabilities where a row is not greedy."""

_WORKSPACE_BYTES = 1 << 30
"""Captured graphs, workspaces of libraries, fragments."""

_UTILIZATION = {"cuda": 0.9}
"""Share of free memory that blocks use unless told: a GPU is the engine's, main memory is not."""

_GPUS = Path("/proc/driver/nvidia/gpus")
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CACHED = ("active_file", "inactive_file")
"""Lines of a control group's statistics that say how much of its memory only caches files."""


def num_blocks_that_fit(
    model: LoadedModel,
    *,
    block_tokens: int,
    utilization: float | None = None,
    override: int | None = None,
    available_bytes: int | None = None,
    step_tokens: int = 0,
) -> int:
    """Blocks for the KV pool: `override`, or what `utilization` of the free memory holds.

    `available_bytes` is measured unless given; on a GPU what a step of `step_tokens` computes
    in is left out. A ConfigError says so when not even one block fits, or when the settings
    make no sense.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens must be positive, got {block_tokens}")
    block_bytes = model.token_bytes * block_tokens
    if override is not None:
        if override < 1:
            raise ConfigError(f"the KV pool needs at least one block, got {override}")
        return override
    if utilization is None:
        utilization = _UTILIZATION.get(model.device.type, 0.5)
    if not 0 < utilization <= 1:
        raise ConfigError(f"memory utilization must be in (0, 1], got {utilization}")
    free = available_bytes if available_bytes is not None else _free_bytes(model)
    if model.device.type == "cuda":
        budget = int(free * utilization) - _step_bytes(model, step_tokens)
        blocks = budget // block_bytes
    else:
        budget = min(int(free * utilization), _MAX_CPU_BYTES)
        blocks = int(budget / (block_bytes * (1 + CONTIGUOUS_SHARE)))
    if blocks < 1:
        raise ConfigError(
            f"not one block fits: {block_tokens} tokens of KV take {block_bytes >> 20} MiB, and "
            f"{max(budget, 0) >> 20} MiB of {free >> 20} MiB free may be used; lower block_tokens "
            f"or give the pool's size"
        )
    return blocks


def _free_bytes(model: LoadedModel) -> int:
    """What the model's device has left, now that the model is on it."""
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0])
    return free_main_bytes()


def _step_bytes(model: LoadedModel, step_tokens: int) -> int:
    """What a step of so many tokens computes in on a GPU: activations, logits, workspaces."""
    config: Any = model.module.config
    packed = (config.num_attention_heads + 2 * model.kv_heads) * model.head_dim
    narrow = 3 * config.hidden_size + 2 * packed
    wide = 3 * config.intermediate_size * min(step_tokens, _WIDE_ROWS)
    activations = (step_tokens * narrow + wide) * model.dtype.itemsize
    rows = min(step_tokens, _MAX_LOGIT_ROWS)
    return int(activations) + rows * model.vocab_size * _LOGIT_BYTES + _WORKSPACE_BYTES


def num_machine_gpus() -> int:
    """GPUs of this machine, at least 1. Other engines may use those that this one does not see."""
    try:
        return max(len(list(_GPUS.iterdir())), 1)
    except OSError:
        return max(torch.cuda.device_count(), 1)


def free_main_bytes() -> int:
    """Free main memory, within the limit of the control group this process is in. Cached files
    count as free: they give way."""
    free = _meminfo_available()
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return free
    if limit == "max":
        return free
    cached = sum(int(line.split()[1]) for line in lines if line.split()[0] in _CACHED)
    return min(free, max(0, int(limit) - used + cached))


def _meminfo_available() -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("this system does not tell its free memory; give the pool's size")
