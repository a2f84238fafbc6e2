"""A storage backend inside a server process that fails when a test orders it.

    --kvcache-storage-backend tests.e2e.faulty:OrderedStorage
    --kvcache-storage-config {"backend": NAME, "settings": {…}, "orders": FILE}

An order is the content of FILE, such as `read FLIPPED_BIT` or `write TORN`. The next call of
that name executes it and removes the file. A torn write stops for ever in the middle of a
block, with half of it on the medium, and creates FILE.torn; then the test kills the process.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any, NoReturn, Self

from headwater.storage import Opening, StorageBackend, open_storage
from headwater.storage.redis.resp import RespConnection
from headwater.testing.faults import Fault, FaultyStorage, Medium
from headwater.testing.media import FileMedium, MooncakeMedium, RedisMedium

Stop = Callable[[], NoReturn]


class OrderedStorage(FaultyStorage):
    """Executes orders and passes other calls to a real backend."""

    def __init__(self, name: str, backend: Any, medium: Medium, orders: Path) -> None:
        super().__init__(backend, {}, medium)
        self._name = name
        self._orders = orders

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        name, inner = settings["backend"], settings["settings"]
        backend = open_storage(name, inner, opening)
        return cls(name, backend, open_medium(name, inner, backend), Path(settings["orders"]))

    def _peek(self, name: str) -> Fault | None:
        ordered, fault = self._read_order()
        return Fault[fault] if ordered == name and fault != "TORN" else None

    def _next(self, name: str) -> Fault | None:
        ordered, fault = self._read_order()
        if ordered != name:
            return None
        self._orders.unlink()
        if fault != "TORN":
            return Fault[fault]
        {"file": tear_file, "redis": tear_redis, "mooncake": tear_mooncake}[self._name](
            self._backend, self._stop
        )
        return None

    def _read_order(self) -> tuple[str, str]:
        try:
            name, fault = self._orders.read_text().split()
        except (FileNotFoundError, ValueError):
            return "", ""
        return name, fault

    def _stop(self) -> NoReturn:
        self._orders.with_suffix(".torn").touch()
        while True:
            Event().wait()


def open_medium(name: str, settings: Mapping[str, Any], backend: Any) -> Medium:
    """The medium below a backend."""
    if name == "file":
        return FileMedium(Path(settings["path"]))
    if name == "redis":
        return RedisMedium(settings["url"])
    return MooncakeMedium(backend._store)


def tear_file(backend: StorageBackend, stop: Stop) -> None:
    """The next slot gets its header and half of its payload."""
    real = os.pwritev

    def pwritev(fd: int, parts: Any, at: int) -> NoReturn:
        page, payload = parts
        real(fd, [page, payload[: len(payload) // 2 // 4096 * 4096]], at)
        stop()

    os.pwritev = pwritev  # type: ignore[assignment]


def tear_redis(backend: StorageBackend, stop: Stop) -> None:
    """The server gets the start of a SET, and half of its value."""
    real = RespConnection.send

    def send(self: RespConnection, parts: Any, deadline: Any) -> None:
        if len(parts) < 3:
            return real(self, parts, deadline)
        start, block, _ = parts
        real(self, [start, block[: len(block) // 2]], deadline)
        stop()

    RespConnection.send = send  # type: ignore[method-assign]


def tear_mooncake(backend: Any, stop: Stop) -> None:
    """The master reserves room for objects whose bytes never arrive."""
    backend._store = _Reserving(backend._store, stop)


class _Reserving:
    """A store that begins to put and never ends."""

    def __init__(self, store: Any, stop: Stop) -> None:
        self._store = store
        self._stop = stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_put_from_multi_buffers(self, names: Any, pointers: Any, sizes: Any) -> NoReturn:
        codes = self._store.batch_put_session_start(names, [sum(parts) for parts in sizes])
        assert codes == [0] * len(names), codes
        self._stop()
