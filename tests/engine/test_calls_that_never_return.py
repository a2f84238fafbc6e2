"""Storage calls that never return, for every kind of call and every backend (lesson 75).

In every case each request ends with the tokens of an uncached run, the breaker opens, and every
slot is returned when the lost calls end. Lost calls never hold device slots.
"""

import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headwater.clock import SystemClock
from headwater.engine.client import ResetReport
from headwater.errors import ConfigError, StorageUnavailable
from headwater.storage import Opening, StorageBackend, open_storage
from headwater.storage.breaker import BreakerConfig
from headwater.storage.late import LateStorage
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.testing.faults import Fault, FaultyStorage
from headwater.testing.tiers import EchoTiers, echo_format
from tests.engine.matrix import (
    BLOCK_TOKENS,
    LINKS,
    PROMPT,
    STUCK_S,
    Bench,
    finish,
    serve,
    storage_of,
    stored,
)
from tests.storage.conftest import MooncakeLender, MooncakeMaster, RedisServer

SHORT_S = 0.05
NUM_PROMPTS = 16
BREAKER = BreakerConfig(recovery_s=60.0)


def prompt_of(number: int) -> list[int]:
    """Prompts that have no block in common."""
    return [(at * 3 + number) % 50 for at in range(33)]


def serve_many(engine: EchoTiers, salt: str) -> None:
    """Serve more requests than it takes to open a breaker."""
    for number in range(NUM_PROMPTS):
        serve(engine, salt, f"{salt} {number}", prompt_of(number))
        engine.core.drain(2 * SHORT_S)


def store_all(bench: Bench, backend: StorageBackend, salt: str) -> None:
    """Let another engine write the blocks of every second prompt."""
    writer = bench.engine(backend, timeout_s=STUCK_S)
    for number in range(0, NUM_PROMPTS, 2):
        serve(writer, salt, f"writer {number}", prompt_of(number))
    finish(writer)


def check_device_is_free(engine: EchoTiers) -> None:
    """Lost calls hold no device slot and nothing that admission needs."""
    device = engine.cache.stats().device
    assert device.free + device.cached == device.total


@pytest.mark.parametrize("call", list(LINKS))
def test_requests_end_and_slots_come_back(
    bench: Bench, backend: StorageBackend, call: str
) -> None:
    """Every call of one kind never returns. The breaker opens after three of them."""
    salt = f"never {call}"
    store_all(bench, backend, salt)
    double = FaultyStorage(backend, {call: [Fault.NEVER] * 1000})
    engine = bench.engine(double, timeout_s=SHORT_S, breaker=BREAKER)

    serve_many(engine, salt)

    stats = storage_of(engine)
    assert (stats.write_breaker if call == "write" else stats.breaker) == "open"
    assert stats.reasons["hung"] >= 3
    assert stats.threads_lost >= 3
    assert engine.failures()[LINKS[call]]["timeout"] >= 3
    check_device_is_free(engine)
    double.release()
    finish(engine)
    while storage_of(engine).threads_lost:
        pass


def test_a_reset_of_storage_ends_though_remove_never_returns(
    bench: Bench, backend: StorageBackend
) -> None:
    """The caller of the reset gets the reason; requests are served meanwhile and afterwards."""
    double = FaultyStorage(backend, {"remove": [Fault.NEVER] * 10})
    engine = bench.engine(double, timeout_s=SHORT_S, breaker=BREAKER)
    reports: list[ResetReport] = []
    serve(engine, "reset", "before", PROMPT)
    engine.core.drain(1.0)

    engine.core.reset_cache(("device", "host", "storage"), reports.append)
    for number in range(3):
        serve(engine, "reset", f"during {number}", PROMPT)
    check_device_is_free(engine)
    end_s = SystemClock().now() + STUCK_S
    while not reports:
        assert SystemClock().now() < end_s, "the reset does not end"
        double.release()
        engine.core.wait()
        engine.step()

    serve(engine, "reset", "after", PROMPT)
    finish(engine)


def test_a_backend_that_never_closes(bench: Bench, backend: StorageBackend) -> None:
    """Shutdown waits for the backend only for a bounded time."""

    class NeverCloses(FaultyStorage):
        def close(self) -> None:
            self._released.wait()

    double = NeverCloses(backend, {})
    engine = bench.engine(double, breaker=BREAKER)
    bench.engines.remove(engine)
    serve(engine, "close", "only", PROMPT)
    engine.core.drain(1.0)

    engine.core.close()

    double.release()


class OpensWithLock(MemoryStorage):
    """A plug-in whose `open` returns only when no other process holds the lock of a file."""

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> "OpensWithLock":
        fcntl.flock(os.open(str(settings["path"]), os.O_RDWR), fcntl.LOCK_EX)
        return cls(MemoryConfig(), opening.format)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening times out, and is tried again, after a tenth of a second."""
    monkeypatch.setattr("headwater.storage.registry.OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr("headwater.storage.late.RETRY_S", 0.1)


def serve_until_stored(
    bench: Bench, backend: StorageBackend, go_on: Callable[[], None]
) -> None:
    """An engine serves while its storage does not open, and uses it once it has opened."""
    breaker = BreakerConfig(recovery_s=0.05, max_recovery_s=0.1)
    engine = bench.engine(backend, timeout_s=STUCK_S, breaker=breaker)
    serve_many(engine, "opens late")
    assert storage_of(engine).blocks_written == 0
    check_device_is_free(engine)

    go_on()
    end_s, number = SystemClock().now() + 2 * STUCK_S, 0
    while not storage_of(engine).blocks_written:
        assert SystemClock().now() < end_s, "storage is not used though it opens"
        number += 1
        serve(engine, f"later {number}", f"later {number}", PROMPT)
        engine.core.drain(0.2)
    finish(engine)
    engine.core.close()


def test_a_backend_that_opens_late(tmp_path: Path, hurried: None) -> None:
    """The engine starts without the backend. Until it is open every lookup is a miss; then it
    is used."""
    path = tmp_path / "lock"
    path.touch()
    held = os.open(path, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    bench = Bench(f"{__name__}:OpensWithLock", {"path": path}, lambda: None)

    serve_until_stored(bench, bench.open(), lambda: os.close(held))


def test_a_backend_that_opens_after_it_was_closed_is_closed(
    tmp_path: Path, hurried: None
) -> None:
    """Closing does not wait for the backend to open, and leaves nothing open."""
    path = tmp_path / "lock"
    path.touch()
    held = os.open(path, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    closed = Event()

    class Opened(OpensWithLock):
        def close(self) -> None:
            closed.set()

    late = LateStorage(
        "late", lambda: Opened.open({"path": path}, make_opening()), block_bytes=64
    )
    with pytest.raises(StorageUnavailable, match="'late' is not open yet"):
        late.wait(0.1).contains([], timeout_s=1.0)
    late.close()
    os.close(held)

    assert closed.wait(STUCK_S)


def make_opening() -> Opening:
    return Opening(format=echo_format(BLOCK_TOKENS))


def make_file_bench(folder: Path) -> Bench:
    settings = {"path": str(folder), "slab_bytes": 8 << 20, "reserve_bytes": 0}
    return Bench("file", settings, lambda: None)


def test_a_directory_that_does_not_answer_is_opened_late(tmp_path: Path, hurried: None) -> None:
    """Opening a FIFO without a writer blocks in the kernel, as a stopped file system does."""
    fifo = tmp_path / "stopped.table"
    os.mkfifo(fifo)
    bench = make_file_bench(tmp_path)

    serve_until_stored(bench, bench.open(), lambda: end_fifo(fifo))


def end_fifo(fifo: Path) -> None:
    """Let every open of `fifo` return."""
    os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))
    writer = os.open(fifo, os.O_RDWR)
    fifo.unlink()
    os.close(writer)


def stop_lookups(folder: Path) -> Callable[[], None]:
    """Put a file into the directory that blocks every process that opens the file. A process
    opens it to look for blocks of other processes."""
    fifo = folder / "stopped.table"
    os.mkfifo(fifo)
    return lambda: end_fifo(fifo)


def stop_growth(folder: Path) -> Callable[[], None]:
    """Let a stopped process hold the lock of the directory, so that no slab is made or taken
    over."""
    held = os.open(folder / "lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    return lambda: os.close(held)


@pytest.mark.parametrize("stop", [stop_lookups, stop_growth])
def test_a_file_system_that_stops_answering(
    tmp_path: Path, stop: Callable[[Path], Callable[[], None]]
) -> None:
    """Real calls block in the kernel, and requests continue without storage."""
    bench = make_file_bench(tmp_path)
    backend = bench.open()
    engine = bench.engine(backend, timeout_s=SHORT_S, breaker=BREAKER)
    go_on = stop(tmp_path)

    serve_many(engine, "stopped")

    stats = storage_of(engine)
    assert "open" in (stats.breaker, stats.write_breaker)
    assert stats.threads_lost >= 1
    check_device_is_free(engine)
    go_on()
    finish(engine)
    engine.core.close()


@pytest.mark.parametrize("call", list(LINKS))
def test_a_stopped_redis_server(tmp_path: Path, call: str) -> None:
    """The server gets SIGSTOP before the first call of each kind: connections stay open and
    nothing answers."""
    server = RedisServer(tmp_path)
    bench = Bench("redis", {"url": server.url}, server.stop)
    backend = bench.open()
    store_all(bench, backend, "stopped")

    class StopsAt(FaultyStorage):
        def _next(self, name: str) -> Fault | None:
            if name == call:
                server.pause()
            return None

    engine = bench.engine(StopsAt(backend, {}), timeout_s=SHORT_S, breaker=BREAKER)

    serve_many(engine, "stopped")

    stats = storage_of(engine)
    assert "open" in (stats.breaker, stats.write_breaker)
    check_device_is_free(engine)
    server.go_on()
    finish(engine)
    for one in bench.engines:
        one.core.close()
    server.stop()


def test_a_redis_server_that_is_down_is_optional_after_a_restart(
    tmp_path: Path, hurried: None
) -> None:
    """A restarted engine starts without the server and uses it when it is back; a first start
    fails."""
    server = RedisServer(tmp_path)
    server.stop()
    bench = Bench("redis", {"url": server.url}, server.stop)
    with pytest.raises(ConfigError, match="refused"):
        bench.open()

    optional = open_storage("redis", bench.settings, make_opening(), is_optional=True)
    serve_until_stored(bench, optional, server.start)

    server.stop()


def test_a_stopped_redis_server_is_opened_late(tmp_path: Path, hurried: None) -> None:
    """The kernel accepts connections but the server answers nothing; an open backend closes at
    once."""
    server = RedisServer(tmp_path)
    bench = Bench("redis", {"url": server.url, "connect_timeout_s": 0.2}, server.stop)
    opened = bench.open()
    server.pause()
    opened.close()

    serve_until_stored(bench, bench.open(), server.go_on)

    server.stop()


@pytest.mark.slow
def test_a_stopped_mooncake_master_is_opened_late(hurried: None) -> None:
    """Mooncake's own `setup` would hold the interpreter lock for as long as the master is
    stopped."""
    master = MooncakeMaster()
    settings = {"master": master.address, "segment_bytes": 1 << 26, "join_timeout_s": 0.5}
    bench = Bench("mooncake", settings, master.stop)
    master.pause()

    serve_until_stored(bench, bench.open(), master.go_on)

    master.stop()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["master", "peer"])
def test_a_stopped_mooncake_pool(part: str) -> None:
    """The master gets SIGSTOP, or the process whose memory holds the blocks."""
    master = MooncakeMaster()
    lender = MooncakeLender(master)
    bench = Bench("mooncake", {"master": master.address, "segment_bytes": 0}, master.stop)
    backend = bench.open()
    stored(bench, backend, "stopped")
    engine = bench.engine(backend, timeout_s=0.3, breaker=BREAKER)
    stopped = master if part == "master" else lender

    stopped.pause()
    for number in range(8):
        serve(engine, "stopped", f"request {number}", PROMPT if number % 2 else PROMPT[::-1])
        engine.core.drain(0.3)

    check_device_is_free(engine)
    stopped.go_on()
    finish(engine)
    for one in bench.engines:
        one.core.close()
    lender.stop()
    master.stop()


@pytest.mark.slow
def test_a_pool_whose_master_is_stopped_can_be_closed() -> None:
    """Mooncake's own `close` would hold the interpreter lock for as long as the master is
    stopped."""
    master = MooncakeMaster()
    settings = {"master": master.address, "segment_bytes": 1 << 26, "join_timeout_s": 0.5}
    backend = Bench("mooncake", settings, master.stop).open()
    master.pause()

    backend.close()

    master.go_on()
    backend._store.close()  # type: ignore[attr-defined] # else it delays the end of this process
    master.stop()
