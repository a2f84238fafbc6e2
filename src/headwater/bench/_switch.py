"""A storage backend for benchmarks: changes several backends and reads from a chosen one.

With it, one computed prefix can be found in each of them in turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from headwater.storage import Opening, StorageBackend, open_storage
from headwater.storage.base import BlockWrite
from headwater.storage.forwarding import ForwardingStorage
from headwater.types import BlockKey


class Switch(ForwardingStorage):
    """`chosen[0]` names the backend that answers lookups and reads; all get writes and removals."""

    def __init__(self, backends: Mapping[str, StorageBackend], chosen: list[str]) -> None:
        super().__init__(backends[chosen[0]])
        self._backends = backends
        self._chosen = chosen

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        """Settings are `media`, by name, and the list `chosen`, which its owner may change."""
        media = settings["media"]
        backends = {name: open_storage(name, media[name], opening) for name in media}
        return cls(backends, settings["chosen"])

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
        return max(
            backend.remove(keys, timeout_s=timeout_s) for backend in self._backends.values()
        )

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()

    def _target(self, call: str) -> StorageBackend:
        return self._backends[self._chosen[0]]
