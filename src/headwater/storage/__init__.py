"""Keeps blocks by key, below the host tier. Blocking I/O, no torch.

Called from transfer threads only. `open_storage` opens a backend by name; `GuardedStorage` adds
circuit breakers to a backend. A failure here is a miss, never wrong text.
"""

from headwater.storage.base import (
    BlockRead,
    BlockWrite,
    Opening,
    StorageBackend,
    StorageStats,
)
from headwater.storage.breaker import BreakerConfig, BreakerState
from headwater.storage.codec import BlockFormat
from headwater.storage.guard import GuardedStorage
from headwater.storage.registry import open_storage

__all__ = [
    "BlockFormat",
    "BlockRead",
    "BlockWrite",
    "BreakerConfig",
    "BreakerState",
    "GuardedStorage",
    "Opening",
    "StorageBackend",
    "StorageStats",
    "open_storage",
]
