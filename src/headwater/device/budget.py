"""How many blocks memory holds: arithmetic, and what the system says is free. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError

CONTIGUOUS_SHARE = 1.0
"""Memory for contiguous buffers of a CPU's decoding sequences, as a share of the pool's."""

_MAX_CPU_BYTES = 4 << 30
"""Pool and buffers take no more main memory than this unless a number is given."""

_WIDE_ROWS = 8192
"""Rows of a large step whose widest activations are in memory at once."""

_MAX_LOGIT_ROWS = 256
_LOGIT_BYTES = 16
"""A logit as the model made it, and its probabilities where a row is not greedy."""

_SAMPLED_BYTES = 8
"""Per sequence and token of the vocabulary: a logit, the same after penalties, and a count."""

_WORKSPACE_BYTES = 1 << 30
"""Captured graphs, workspaces of libraries, fragments."""

_CPU_SHARE, _GPU_SHARE, _LARGE_GPU_SHARE = 0.5, 0.9, 0.95
"""Shares of free memory that blocks use unless told: a GPU is the engine's, main memory is not."""

_LARGE_GPU_BYTES = 64 << 30
"""With more free memory than this, a twentieth is enough for what is not accounted for."""

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CACHED = ("active_file", "inactive_file")
"""Lines of a control group's statistics that say how much of its memory only caches files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What the memory that a step computes in depends on."""

    hidden_size: int
    intermediate_size: int
    packed_size: int
    """Numbers of Q, K and V of one token."""

    vocab_size: int
    element_bytes: int

    def num_bytes(self, step_tokens: int, max_num_seqs: int = 0) -> int:
        """Activations, logits and workspaces of a step of so many tokens on a GPU, and what is
        kept for sampling so many sequences."""
        narrow = 3 * self.hidden_size + 2 * self.packed_size
        wide = 3 * self.intermediate_size * min(step_tokens, _WIDE_ROWS)
        activations = (step_tokens * narrow + wide) * self.element_bytes
        rows = min(step_tokens, _MAX_LOGIT_ROWS)
        logits = rows * _LOGIT_BYTES + max_num_seqs * _SAMPLED_BYTES
        return activations + logits * self.vocab_size + _WORKSPACE_BYTES


def intermediate_size(config: Mapping[str, Any]) -> int:
    """Width of the MLPs of a model with this config.json."""
    return int(config.get("intermediate_size") or config.get("ffn_hidden_size") or 0)


def blocks_within(
    free: int,
    *,
    device_type: str,
    block_tokens: int,
    block_bytes: int,
    utilization: float | None,
    step_bytes: int,
) -> int:
    """Blocks for the KV pool of a device with `free` bytes left beside the weights.

    On a GPU, `step_bytes` are left for computing. A ConfigError says so when not even one
    block fits, or when the settings make no sense.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens must be positive, got {block_tokens}")
    if utilization is None:
        utilization = _default_share(device_type, free)
    if not 0 < utilization <= 1:
        raise ConfigError(f"memory utilization must be in (0, 1], got {utilization}")
    if device_type == "cuda":
        budget = int(free * utilization) - step_bytes
        blocks = budget // block_bytes
    else:
        budget = min(int(free * utilization), _MAX_CPU_BYTES)
        blocks = int(budget / (block_bytes * (1 + CONTIGUOUS_SHARE)))
    if blocks < 1:
        raise ConfigError(
            f"not one block fits: {block_tokens} tokens of KV take {block_bytes >> 20} MiB, and "
            f"{max(budget, 0) >> 20} MiB of {max(free, 0) >> 20} MiB free may be used; lower "
            f"block_tokens or give the pool's size"
        )
    return blocks


def _default_share(device_type: str, free: int) -> float:
    if device_type != "cuda":
        return _CPU_SHARE
    return _LARGE_GPU_SHARE if free >= _LARGE_GPU_BYTES else _GPU_SHARE


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
