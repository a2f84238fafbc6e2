"""Calculates how many blocks fit into memory, from the free memory of the system. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError

CONTIGUOUS_SHARE = 1.0
"""Memory for contiguous buffers of decoding sequences on a CPU, as a share of the pool."""

_MAX_CPU_BYTES = 4 << 30
"""Maximum main memory of pool and buffers together, unless a number is given."""

_WIDE_ROWS = 8192
"""Rows of a large step whose widest activations are in memory at the same time."""

_MAX_LOGIT_ROWS = 256
_LOGIT_BYTES = 16
"""Bytes per logit: the logit itself, and its probability for rows that are not greedy."""

_SAMPLED_BYTES = 8
"""Bytes per sequence and vocabulary entry: a logit, the logit after penalties, and a count."""

_WORKSPACE_BYTES = 1 << 30
"""Memory for captured graphs, workspaces of libraries, and fragmentation."""

_CPU_SHARE, _GPU_SHARE, _LARGE_GPU_SHARE = 0.5, 0.9, 0.95
"""Default shares of free memory for blocks. The engine owns a GPU, but not main memory."""

_LARGE_GPU_BYTES = 64 << 30
"""Above this much free memory, a twentieth is enough for memory that is not accounted for."""

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CACHED = ("active_file", "inactive_file")
"""Lines of a control group's statistics that count cached files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What determines the memory of a step."""

    hidden_size: int
    intermediate_size: int
    packed_size: int
    """Elements of Q, K and V of one token."""

    vocab_size: int
    element_bytes: int

    def num_bytes(self, step_tokens: int, max_num_seqs: int = 0) -> int:
        """Activations, logits and workspaces of a step with this many tokens on a GPU, and the
        sampling state of this many sequences."""
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

    On a GPU, `step_bytes` are left for computing. Raises ConfigError if not even one block
    fits, or if a setting is invalid.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens must be positive, got {block_tokens}")
    if utilization is None:
        utilization = _default_share(device_type, free)
    if not 0 < utilization <= 1:
        raise ConfigError(
            f"memory utilization must be above 0 and at most 1, got {utilization}"
        )
    if device_type == "cuda":
        budget = int(free * utilization) - step_bytes
        blocks = budget // block_bytes
    else:
        budget = min(int(free * utilization), _MAX_CPU_BYTES)
        blocks = int(budget / (block_bytes * (1 + CONTIGUOUS_SHARE)))
    if blocks < 1:
        raise ConfigError(
            f"no block fits: {block_tokens} tokens of KV take {block_bytes >> 20} MiB, and "
            f"{max(budget, 0) >> 20} MiB of {max(free, 0) >> 20} MiB free may be used; lower "
            f"--block-size or give --num-gpu-blocks-override"
        )
    return blocks


def _default_share(device_type: str, free: int) -> float:
    if device_type != "cuda":
        return _CPU_SHARE
    return _LARGE_GPU_SHARE if free >= _LARGE_GPU_BYTES else _GPU_SHARE


def free_main_bytes() -> int:
    """Free main memory, within the limit of this process's control group. Cached files count as
    free, because the system drops them when memory is needed."""
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
    raise ConfigError(
        "this system does not report its free memory; give --num-gpu-blocks-override"
    )
