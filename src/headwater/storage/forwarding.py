"""A backend that passes its calls on to another one: a base class for backends that change some
of the calls."""

from collections.abc import Sequence

from headwater.storage.base import BlockRead, BlockWrite, StorageBackend, StorageStats
from headwater.types import BlockKey


class ForwardingStorage:
    """A `StorageBackend` that passes every call on to `backend`; subclasses override some."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        return self._target("contains").contains(runs, timeout_s=timeout_s)

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        return self._target("read").read(keys, into, timeout_s=timeout_s)

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        target = self._target("write")
        return target.write(keys, blocks, parents=parents, timeout_s=timeout_s)

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        return self._target("remove").remove(keys, timeout_s=timeout_s)

    def stats(self) -> StorageStats:
        return self._target("stats").stats()

    def close(self) -> None:
        self._backend.close()

    def _target(self, call: str) -> StorageBackend:
        """The backend that gets a call of this name. A subclass may choose one, wait, or
        raise."""
        return self._backend
