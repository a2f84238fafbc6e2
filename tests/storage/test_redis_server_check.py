"""What the redis backend reports about a server at start, and how it handles odd replies."""

import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from headwater.clock import SystemClock
from headwater.errors import ConfigError, StorageError
from headwater.storage import (
    BlockRead,
    BlockWrite,
    BreakerConfig,
    GuardedStorage,
    Opening,
    StorageBackend,
    open_storage,
)
from headwater.storage.calls import Deadline
from headwater.storage.redis.backend import RedisStorage
from headwater.storage.redis.config import RedisConfig
from headwater.storage.redis.resp import Address, RespConnection, command
from headwater.testing.ports import free_port
from headwater.testing.storage import make_format, make_keys, read_run, write_run
from tests.storage.conftest import RedisServer

BLOCK_BYTES = 4096
FORM = make_format(block_bytes=BLOCK_BYTES)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A separate server."""
    server = RedisServer(tmp_path)
    yield server
    server.stop()


def open_redis(url: str, **more: object) -> StorageBackend:
    return open_storage("redis", {"url": url, **more}, Opening(format=FORM))


def tell(url: str, *words: str) -> None:
    """Send one command and wait until the server has answered it."""
    deadline = Deadline(SystemClock(), 10.0, url)
    link = RespConnection(Address.parse(url), None, 5.0, deadline)
    link.send([command(*(word.encode() for word in words))], deadline)
    link.skip_reply(deadline)
    link.close()


def test_cluster_mode_is_refused(tmp_path: Path) -> None:
    """Half of the keys would be on other nodes."""
    # Without a port of its own the cluster bus takes the server's port + 10,000, if there is one.
    bus = ("--cluster-port", str(free_port()))
    server = RedisServer(tmp_path, "--cluster-enabled", "yes", *bus)
    with pytest.raises(ConfigError, match="node of a Redis cluster, which is not supported"):
        open_redis(server.url)
    server.stop()


def test_a_sentinel_is_refused(tmp_path: Path) -> None:
    """A Sentinel is recognised by the server's own description, and by the form of the URL."""
    (tmp_path / "sentinel.conf").touch()
    server = RedisServer(tmp_path, "--sentinel", config=tmp_path / "sentinel.conf")
    with pytest.raises(ConfigError, match="Redis Sentinel, which holds no data"):
        open_redis(server.url)
    server.stop()
    for scheme in ("redis-sentinel", "redis+sentinel", "redis+cluster"):
        with pytest.raises(ConfigError, match="Sentinel and cluster mode are not supported"):
            open_redis(f"{scheme}://127.0.0.1:26379")


def test_missing_rights_are_named_with_the_grant(server: RedisServer) -> None:
    """Every command that is used later is tried once; the message has the command to run."""
    tell(
        server.url,
        *[
            "ACL",
            "SETUSER",
            "half",
            "on",
            ">pw",
            "~headwater:*",
            "+get",
            "+exists",
            "+select",
            "+ping",
        ],
    )
    url = f"redis://half:pw@127.0.0.1:{server.port}"
    with pytest.raises(ConfigError, match="may not run SET, GETRANGE, UNLINK, SCAN") as caught:
        open_redis(url)
    assert "ACL SETUSER half +set +getrange +unlink +scan ~headwater:*" in str(caught.value)

    tell(server.url, *["ACL", "SETUSER", "half", "+set", "+getrange", "+unlink", "+scan"])
    storage = open_redis(url)
    assert write_run(storage, make_keys(2), BLOCK_BYTES) == [BlockWrite.WRITTEN] * 2
    assert read_run(storage, make_keys(2), BLOCK_BYTES) == [BlockRead.READ] * 2
    storage.close()
    with pytest.raises(ConfigError, match="on keys that begin with 'other:'"):
        open_redis(url, key_prefix="other:")


@pytest.mark.parametrize(
    ("settings", "more", "sentence"),
    [
        (("maxmemory", "0"), {}, "it has no memory limit and blocks have no ttl_s"),
        (("maxmemory", "50mb", "maxmemory-policy", "noeviction"), {}, "policy is noeviction"),
        (
            ("maxmemory", "50mb", "maxmemory-policy", "volatile-lru"),
            {},
            "evicts only keys with a time to live, and ttl_s is not set",
        ),
        (("maxmemory", "50mb", "maxmemory-policy", "volatile-lru"), {"ttl_s": 60.0}, ""),
        (("maxmemory", "50mb", "maxmemory-policy", "allkeys-lru"), {}, ""),
        (("maxmemory", "0"), {"ttl_s": 60.0}, ""),
    ],
)
def test_eviction_that_does_not_bound_the_store_is_a_warning(
    server: RedisServer,
    settings: tuple[str, ...],
    more: dict[str, object],
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The store works, but will be full or too large one day."""
    tell(server.url, "CONFIG", "SET", *settings)

    open_redis(server.url, **more).close()

    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == bool(sentence)
    assert sentence in "".join(warnings)


def test_values_of_another_program_are_a_warning_and_a_miss(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A list under the name of a block is removed like a damaged block; other blocks of the
    batch are served."""
    storage = open_redis(server.url)
    keys = make_keys(3)
    write_run(storage, [keys[0], keys[2]], BLOCK_BYTES)
    tell(server.url, "LPUSH", f"headwater:{keys[1].hex()}", "x")
    caplog.clear()

    open_redis(server.url).close()
    assert any("is a list: another program" in r.getMessage() for r in caplog.records)
    outcomes = [BlockRead.READ, BlockRead.DAMAGED, BlockRead.READ]
    assert read_run(storage, keys, BLOCK_BYTES) == outcomes
    assert storage.stats().reasons == {"wrong_type": 1}
    assert write_run(storage, keys, BLOCK_BYTES)[1] is BlockWrite.WRITTEN
    tell(server.url, "LPUSH", "headwater:list", "x")
    assert storage.remove(None, timeout_s=5) == 3
    storage.close()


def test_a_read_only_replica_serves_reads(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """READONLY stops only writes: the write breaker opens; reads are answered, also for damaged
    blocks."""
    folder = tmp_path / "replica"
    folder.mkdir()
    primary = open_redis(server.url)
    keys = make_keys(4)
    write_run(primary, keys, BLOCK_BYTES)
    replica = RedisServer(folder, "--replicaof", "127.0.0.1", str(server.port))
    raw = open_redis(replica.url)
    clock = SystemClock()
    end_s = clock.now() + 20.0
    while raw.contains([keys], timeout_s=5) != [4]:
        assert clock.now() < end_s, "the replica does not copy"
    tell(server.url, "SET", f"headwater:{keys[3].hex()}", "damaged")
    while read_run(raw, keys, BLOCK_BYTES)[3] is BlockRead.READ:
        assert clock.now() < end_s, "the replica does not copy"

    storage = GuardedStorage(raw, BreakerConfig(), clock)
    for _ in range(4):
        with pytest.raises(StorageError):
            write_run(storage, make_keys(2, run="new"), BLOCK_BYTES)
    assert read_run(storage, keys, BLOCK_BYTES) == [BlockRead.READ] * 3 + [BlockRead.DAMAGED]
    stats = storage.stats()
    assert (stats.breaker, stats.write_breaker) == ("closed", "open")
    assert any("read-only replica" in record.getMessage() for record in caplog.records)
    storage.close()
    primary.close()
    replica.stop()


def test_a_user_without_a_password_is_a_mistake_in_the_url() -> None:
    """With such a URL the backend would log in as the default user."""
    with pytest.raises(ConfigError, match="has a user and no password"):
        open_redis("redis://worker@127.0.0.1:6379")


MALFORMED = [
    b"$--5\r\n",
    b"$-2\r\n",
    b"$\r\n",
    b"$99999999999999\r\n",
    b"$" + b"9" * 900 + b"\r\n",
    b":1\r\n",
    b":-1\r\n",
    b":x\r\n",
    b"*3\r\n",
    b"*-1\r\n",
    b"_\r\n",
    b"%2\r\n",
    b"\r\n",
    b"\xff\xfe\r\n",
    b"$5\r\nhello\r\n",
    b"-ERR x\r\n",
    b"-\r\n",
    b"+\r\n",
]


class Parrot:
    """A server that greets like Redis and answers everything else with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        answer = b"+OK\r\n"
        with peer, contextlib.suppress(OSError):
            while peer.recv(1 << 16):
                peer.sendall(answer)
                answer = self._answer


@pytest.mark.parametrize("answer", MALFORMED)
def test_malformed_replies_are_storage_errors(answer: bytes) -> None:
    """No call raises a ValueError or returns a block."""
    parrot = Parrot(answer)
    storage = RedisStorage(RedisConfig(url=parrot.url), FORM, SystemClock())
    keys, views = make_keys(1), [memoryview(bytearray(BLOCK_BYTES))]
    calls = [
        lambda: storage.contains([keys], timeout_s=0.2),
        lambda: storage.read(keys, views, timeout_s=0.2),
        lambda: storage.write(keys, views, parents=keys, timeout_s=0.2),
        lambda: storage.remove(keys, timeout_s=0.2),
        lambda: storage.remove(None, timeout_s=0.2),
    ]

    for call in calls:
        try:
            found = call()
        except StorageError:
            continue
        assert found in ([BlockRead.DAMAGED], [BlockWrite.PRESENT], [1], [0], 0, 1)
    with pytest.raises(ConfigError):
        open_redis(parrot.url)
    storage.close()
    parrot.close()


def test_a_reply_with_an_error_is_not_asked_for_twice(server: RedisServer) -> None:
    """Blocks that the server refuses are not sent again over another connection."""
    storage = open_redis(server.url)
    tell(server.url, *["CONFIG", "SET", "min-replicas-to-write", "1"])
    before = server_bytes(server.url)

    with pytest.raises(StorageError, match="NOREPLICAS"):
        write_run(storage, make_keys(8), BLOCK_BYTES)

    assert server_bytes(server.url) - before < 12 * BLOCK_BYTES
    storage.close()


def server_bytes(url: str) -> int:
    """Bytes that the server has received."""
    deadline = Deadline(SystemClock(), 10.0, url)
    link = RespConnection(Address.parse(url), None, 5.0, deadline)
    link.send([command(b"INFO", b"stats")], deadline)
    text = link.value(deadline).decode()
    link.close()
    [line] = [x for x in text.splitlines() if x.startswith("total_net_input_bytes:")]
    return int(line.partition(":")[2])


def test_warnings_name_the_server_without_its_password(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Many people read logs."""
    tell(server.url, *["ACL", "SETUSER", "worker", "on", ">secretword", "~*", "+@all"])
    with caplog.at_level(logging.WARNING):
        open_redis(f"redis://worker:secretword@127.0.0.1:{server.port}").close()
    assert caplog.records
    assert "secretword" not in caplog.text
