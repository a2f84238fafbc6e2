"""Settings of all storage plug-ins, and the storage that they open."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.clock import Clock
from headwater.errors import ConfigError
from headwater.storage import (
    BlockFormat,
    BreakerConfig,
    GuardedStorage,
    Opening,
    StorageBackend,
    open_storage,
)
from headwater.storage.settings import read_settings
from headwater.transfer.mover import TransferConfig

WRITE_BLOCKS = 16
"""Maximum number of blocks in one call to storage: enough to keep the threads of a backend busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """Which storage to use, and how long to wait for it."""

    backend: str = "file"
    """`file`, `redis`, `mooncake`, `memory`, or your own as `module:Class`."""

    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the backend; see docs/storage.md."""

    weights: str | None = None
    """A name that changes whenever the weights change, for plug-ins that cannot identify the
    weights themselves."""

    adapters: str | None = None
    """`named` if the name of a LoRA adapter identifies its weights everywhere in this storage;
    None if it does not."""

    allow_untested: bool = False
    """Allows a version of the engine with which no test ran."""

    lookup_timeout_s: float = 1.0
    """Longest wait for a lookup; afterwards it counts as a miss."""

    read_timeout_s: float = 5.0
    """Longest wait for a read; afterwards the blocks are computed."""

    write_timeout_s: float = 60.0
    """Longest time for a write; no request waits for it."""

    max_waiting_writes: int = 4096
    """Maximum number of blocks that wait to be written; those least likely to be used again are
    dropped."""

    def __post_init__(self) -> None:
        if self.max_waiting_writes < WRITE_BLOCKS:
            raise ConfigError(
                f"max_waiting_writes must be at least {WRITE_BLOCKS}, the blocks of one write, "
                f"got {self.max_waiting_writes}"
            )
        if self.adapters not in (None, "named"):
            raise ConfigError(f'adapters must be "named" or left out, got {self.adapters!r}')

    @classmethod
    def read(
        cls, given: Mapping[str, Any], plugin: str, *, unused: Sequence[str] = ()
    ) -> "PluginConfig":
        """Settings from the other engine's configuration; ConfigError names a wrong one, or one
        of `unused`, which have no effect in this plug-in."""
        rest = dict(given)
        for name in unused:
            if name in rest:
                raise ConfigError(f"{name} has no effect in {plugin}; remove it")
        config = rest.pop("config", {})
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"config of {plugin} must be an object of settings, got {config!r}"
            )
        return replace(read_settings(cls, rest, plugin), config=dict(config))

    def timeouts(self) -> TransferConfig:
        """The timeouts of this configuration, as settings of the mover."""
        return TransferConfig(
            read_timeout_s=self.read_timeout_s,
            write_timeout_s=self.write_timeout_s,
            lookup_timeout_s=self.lookup_timeout_s,
        )

    def open(
        self, identity: bytes, block_bytes: int, memory: memoryview | None, clock: Clock
    ) -> GuardedStorage:
        """Open the storage, with breakers. Raises ConfigError with what to change if it cannot
        open."""
        opening = Opening(
            format=BlockFormat(fingerprint=identity, block_bytes=block_bytes),
            clock=clock,
            memory=memory,
            environ=dict(os.environ),
        )
        backend: StorageBackend = open_storage(self.backend, self.config, opening)
        return GuardedStorage(backend, BreakerConfig(), clock)
