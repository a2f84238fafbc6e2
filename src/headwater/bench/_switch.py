"""A storage backend for benchmarks: writes to several backends and reads from a chosen one.

With it, one computed prefix can be found in each of them in turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from headwater.storage import Opening, StorageBackend, open_storage
from headwater.storage.base import BlockRead, BlockWrite, StorageStats
from headwater.types import BlockKey


class Switch:
    """`chosen[0]` names the backend that is asked and read."""

    def __init__(self, backends: Mapping[str, StorageBackend], chosen: list[str]) -> None:
        self._backends = backends
        self._chosen = chosen

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        """Settings are `media`, by name, and the list `chosen`, which its owner may change."""
        media = settings["media"]
        backends = {name: open_storage(name, media[name], opening) for name in media}
        return cls(backends, settings["chosen"])

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        return self._current.contains(runs, timeout_s=timeout_s)

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        return self._current.read(keys, into, timeout_s=timeout_s)

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        for backend in self._backends.values():
            written = backend.write(keys, blocks, parents=parents, timeout_s=timeout_s)
        return written

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        return self._current.remove(keys, timeout_s=timeout_s)

    def stats(self) -> StorageStats:
        return self._current.stats()

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()

    @property
    def _current(self) -> StorageBackend:
        return self._backends[self._chosen[0]]
