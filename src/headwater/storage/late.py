"""A backend that opens in a thread: a mount or a server may answer late, or never.

Until it is open every call is refused at once, so every request misses in this tier. An open
that ends with StorageTimeout is tried again. Any other error ends the start of the engine, so
that a wrong address is noticed. If the engine has started meanwhile, or was restarted, the open
is tried again after any error.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread

from headwater.errors import StorageTimeout, StorageUnavailable
from headwater.storage.base import BlockRead, BlockWrite, StorageBackend, StorageStats
from headwater.storage.calls import StorageCounters
from headwater.types import BlockKey

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Wait between two tries to open."""


class LateStorage:
    """A `StorageBackend` around one that is being opened."""

    def __init__(
        self,
        name: str,
        open_backend: Callable[[], StorageBackend],
        *,
        block_bytes: int,
        is_optional: bool = False,
    ) -> None:
        """Start to open. The thread is a daemon: it never keeps the process from exiting. If
        `is_optional`, no error of opening is final."""
        self._name = name
        self._open_backend = open_backend
        self._empty = StorageCounters(name, block_bytes)
        self._backend: StorageBackend | None = None
        self._error: Exception | None = None
        self._lock = Lock()
        """Guards `_backend` and `_is_closed`, so that a late backend is closed exactly once."""
        self._is_closed = False
        self._is_late = is_optional
        self._ended = Event()
        """Set when `wait` need not wait any more: the backend is open, the error is final, or
        the backend is optional and the first try failed."""
        self._is_optional = is_optional
        self._closing = Event()
        Thread(target=self._open, name="storage-open", daemon=True).start()

    def wait(self, timeout_s: float) -> StorageBackend:
        """The backend itself if it opens within `timeout_s`, else this object, which passes
        calls on as soon as the backend is open. Raises what opening raised."""
        self._ended.wait(timeout_s)
        if self._error is not None:
            raise self._error
        backend = self._backend
        if backend is None:
            self._is_late = True
            log.warning(
                "storage is not open yet, requests are served without it: backend=%s",
                self._name,
            )
        return backend or self

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        return self._opened().contains(runs, timeout_s=timeout_s)

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        return self._opened().read(keys, into, timeout_s=timeout_s)

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        return self._opened().write(keys, blocks, parents=parents, timeout_s=timeout_s)

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        return self._opened().remove(keys, timeout_s=timeout_s)

    def stats(self) -> StorageStats:
        """The statistics of the backend; all zero while it is not open."""
        backend = self._backend
        return self._empty.stats() if backend is None else backend.stats()

    def close(self) -> None:
        """Close the backend now, or as soon as it has opened."""
        self._closing.set()
        with self._lock:
            first, self._is_closed = not self._is_closed, True
            backend = self._backend
        if first and backend is not None:
            backend.close()

    def _opened(self) -> StorageBackend:
        backend = self._backend
        if backend is None:
            raise StorageUnavailable(f"storage backend {self._name!r} is not open yet")
        return backend

    def _open(self) -> None:
        while not self._closing.is_set():
            try:
                self._take(self._open_backend())
            except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
                if not (self._is_late or isinstance(error, StorageTimeout)):
                    self._error = error
                    break
                log.warning(
                    "storage does not open: backend=%s retry_s=%g error=%s",
                    *(self._name, RETRY_S, error),
                )
                if self._is_optional:
                    self._ended.set()
                self._closing.wait(RETRY_S)
            else:
                break
        self._ended.set()

    def _take(self, backend: StorageBackend) -> None:
        with self._lock:
            self._backend = backend
            closed = self._is_closed
        if closed:
            backend.close()
        elif self._is_late:
            log.warning("storage has opened late: backend=%s", self._name)
