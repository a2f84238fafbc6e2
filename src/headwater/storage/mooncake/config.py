"""Settings of the `mooncake` backend, under our names and under Mooncake's own.

They are read from three places, and the first one that has a value wins: the backend's
settings, the environment (`MOONCAKE_MASTER` …), and the JSON file that `MOONCAKE_CONFIG_PATH`
names.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError
from headwater.storage.settings import read_settings

_FILE_NAMES = {
    "local_hostname": "local_hostname",
    "metadata_server": "metadata_server",
    "global_segment_size": "segment_bytes",
    "local_buffer_size": "buffer_bytes",
    "protocol": "protocol",
    "device_name": "rdma_devices",
    "master_server_address": "master",
    "master_server_addr": "master",
}
_VARIABLES = {
    "MOONCAKE_LOCAL_HOSTNAME": "local_hostname",
    "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "segment_bytes",
    "MOONCAKE_LOCAL_BUFFER_SIZE": "buffer_bytes",
    "MOONCAKE_PROTOCOL": "protocol",
    "MOONCAKE_DEVICE": "rdma_devices",
    "MOONCAKE_MASTER": "master",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """Settings of the `mooncake` backend."""

    master: str
    """host:port of the `mooncake_master`."""

    local_hostname: str = "127.0.0.1"
    """Name or address under which other machines reach this one."""

    metadata_server: str = "P2PHANDSHAKE"
    """Where segments are described; the default needs no server."""

    protocol: str = "tcp"
    """`tcp` or `rdma`."""

    rdma_devices: str = ""
    """RDMA devices, with commas between; empty lets Mooncake choose."""

    segment_bytes: int = 4 << 30
    """Memory that this process lends to the pool; 0 only uses the memory of others."""

    buffer_bytes: int = 16 << 20
    """Memory for Mooncake's own bookkeeping."""

    key_prefix: str = "headwater:"
    """Prefix of the names of blocks in the pool."""

    num_threads: int = 4
    """Calls in flight at once."""

    join_timeout_s: float = 10.0
    """Longest wait for the master when the pool is joined or left."""

    def __post_init__(self) -> None:
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"Mooncake's protocol must be tcp or rdma, got {self.protocol!r}")
        if self.num_threads < 1 or self.segment_bytes < 0 or self.buffer_bytes < 0:
            raise ConfigError(
                "num_threads of storage backend 'mooncake' must be at least 1, segment_bytes and "
                f"buffer_bytes not negative, got {self.num_threads}, {self.segment_bytes} and "
                f"{self.buffer_bytes}"
            )


def mooncake_config(settings: Mapping[str, Any], environ: Mapping[str, str]) -> MooncakeConfig:
    """The settings from all three places. Raises ConfigError if they cannot work."""
    merged = _from_file(environ.get("MOONCAKE_CONFIG_PATH"))
    merged |= {name: environ[var] for var, name in _VARIABLES.items() if environ.get(var)}
    merged |= {_FILE_NAMES.get(name, name): value for name, value in settings.items()}
    if "master" not in merged:
        raise ConfigError(
            "storage backend 'mooncake' needs a master: set master (host:port), "
            "MOONCAKE_MASTER or MOONCAKE_CONFIG_PATH"
        )
    return read_settings(MooncakeConfig, merged, "mooncake")


def _from_file(path: str | None) -> dict[str, Any]:
    if not path:
        return {}
    try:
        given = json.loads(Path(path).read_text())
        # Mooncake's file also has settings of other programs; unknown ones are ignored.
        return {
            _FILE_NAMES[name]: value for name, value in given.items() if name in _FILE_NAMES
        }
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"MOONCAKE_CONFIG_PATH {path!r} cannot be used: {error}") from error
