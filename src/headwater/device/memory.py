"""Measures the device, then says how many blocks its KV pool may have."""

from pathlib import Path

from headwater.device.model import LoadedModel
from headwater.device.runner import LANE_SHARE
from headwater.errors import ConfigError

_MOST_BYTES = 4 << 30
"""Pool and lanes take no more main memory than this unless a number is given."""

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def num_blocks_that_fit(
    model: LoadedModel,
    *,
    block_tokens: int,
    utilization: float = 0.5,
    override: int | None = None,
    available_bytes: int | None = None,
) -> int:
    """Blocks for the KV pool: `override`, or what `utilization` of the free memory holds.

    `available_bytes` is measured unless given. A ConfigError says so when not even one
    block fits, or when the settings make no sense.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens must be positive, got {block_tokens}")
    block_bytes = model.token_bytes * block_tokens
    if override is not None:
        if override < 1:
            raise ConfigError(f"the KV pool needs at least one block, got {override}")
        return override
    if not 0 < utilization <= 1:
        raise ConfigError(f"memory utilization must be in (0, 1], got {utilization}")
    free = available_bytes if available_bytes is not None else _available_bytes()
    budget = min(int(free * utilization), _MOST_BYTES)
    blocks = int(budget / (block_bytes * (1 + LANE_SHARE)))
    if blocks < 1:
        raise ConfigError(
            f"not one block fits: {block_tokens} tokens of KV take {block_bytes >> 20} MiB, and "
            f"{budget >> 20} MiB of {free >> 20} MiB free may be used; lower block_tokens "
            f"or give the pool's size"
        )
    return blocks


def _available_bytes() -> int:
    """Free main memory, within the limit of the control group this process is in."""
    free = _meminfo_available()
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = (_CGROUP / "memory.current").read_text().strip()
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))


def _meminfo_available() -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("this system does not tell its free memory; give the pool's size")
