"""The redis backend against a real server: login, bounds, restarts, timeouts."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from headwater.clock import SystemClock
from headwater.errors import ConfigError, StorageError, StorageTimeout
from headwater.storage import BlockRead, BlockWrite, Opening, open_storage
from headwater.storage.calls import Deadline
from headwater.storage.codec import HEADER_BYTES
from headwater.storage.redis.backend import RedisStorage
from headwater.storage.redis.config import RedisConfig
from headwater.storage.redis.resp import RespConnection, command
from headwater.testing.media import RedisMedium
from headwater.testing.ports import free_port
from headwater.testing.storage import (
    make_block,
    make_format,
    make_keys,
    read_run,
    write_run,
)
from tests.storage.conftest import RedisServer

BLOCK_BYTES = 8192
FORM = make_format(block_bytes=BLOCK_BYTES)


def open_redis(url: str, **more: object) -> RedisStorage:
    storage = open_storage("redis", {"url": url, **more}, Opening(format=FORM))
    assert isinstance(storage, RedisStorage)
    return storage


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may stop, with two users and little memory."""
    server = RedisServer(
        tmp_path,
        *("--requirepass", "open sesame"),
        *("--user", "worker", "on", ">work@home", "~*", "+@all"),
        *("--maxmemory", "3mb", "--maxmemory-policy", "noeviction"),
    )
    yield server
    server.stop()


def url_of(server: RedisServer, who: str) -> str:
    return f"redis://{who}@127.0.0.1:{server.port}"


def test_users_and_passwords(own_server: RedisServer) -> None:
    """The default user, a named one, and characters that a URL must quote all work."""
    for who in (":open%20sesame", "default:open%20sesame", "worker:work%40home"):
        storage = open_redis(url_of(own_server, who), key_prefix=who)
        assert write_run(storage, make_keys(1), BLOCK_BYTES) == [BlockWrite.WRITTEN]
        storage.close()


def test_a_wrong_password_gets_a_message_at_start(own_server: RedisServer) -> None:
    """The message names the user and no password (lesson 61)."""
    with pytest.raises(ConfigError, match="refused the password of user 'worker'") as caught:
        open_redis(url_of(own_server, "worker:guess"))
    assert "guess" not in str(caught.value)
    with pytest.raises(ConfigError, match="refused the password of the default user"):
        open_redis(url_of(own_server, ":guess"))
    with pytest.raises(ConfigError, match="requires a password"):
        open_redis(own_server.url)


def test_a_server_that_is_not_running_gets_a_message_at_start() -> None:
    """The message has the server's address (lesson 61)."""
    with pytest.raises(ConfigError, match=r"redis://127\.0\.0\.1:\d+/0"):
        open_redis(f"redis://127.0.0.1:{free_port()}")


def test_forgetting_everything_leaves_other_models_alone(redis_server: RedisServer) -> None:
    """Blocks under one prefix are distinguished by the fingerprint in their header; there are
    more blocks than one answer of the server lists."""
    prefix = {"key_prefix": "forget[*]?:"}
    ours = open_storage("redis", {"url": redis_server.url} | prefix, Opening(format=FORM))
    other = replace(FORM, fingerprint=FORM.fingerprint[::-1])
    theirs = open_storage("redis", {"url": redis_server.url} | prefix, Opening(format=other))
    keys, foreign = make_keys(1500, run="ours"), make_keys(3, run="theirs")
    write_run(ours, keys, BLOCK_BYTES)
    write_run(theirs, foreign, BLOCK_BYTES)

    assert ours.remove(None, timeout_s=30) == 1500

    assert ours.contains([keys], timeout_s=5) == [0]
    assert theirs.contains([foreign], timeout_s=5) == [3]
    theirs.remove(None, timeout_s=5)
    ours.close()
    theirs.close()


def test_a_block_crosses_as_its_header_and_its_bytes(redis_server: RedisServer) -> None:
    """Lesson 32: the name is a hash of the tokens, not the tokens; the value is only header and
    bytes."""
    storage = open_redis(redis_server.url)
    (key,) = make_keys(1, run="crosses")
    write_run(storage, [key], BLOCK_BYTES)
    medium = RedisMedium(redis_server.url)

    value = medium.fetch(key)

    assert len(value) == HEADER_BYTES + BLOCK_BYTES
    assert value[HEADER_BYTES:] == make_block(key, BLOCK_BYTES)
    medium.close()
    storage.close()


def test_databases_are_apart(redis_server: RedisServer) -> None:
    """The number in the URL is honoured."""
    first = open_redis(f"redis://127.0.0.1:{redis_server.port}/1")
    second = open_redis(f"redis://127.0.0.1:{redis_server.port}/2")
    keys = make_keys(1)
    write_run(first, keys, BLOCK_BYTES)

    assert (
        first.contains([keys], timeout_s=5)[0],
        second.contains([keys], timeout_s=5)[0],
    ) == (1, 0)
    first.remove(keys, timeout_s=5)
    first.close()
    second.close()
    with pytest.raises(ConfigError, match="DB index is out of range"):
        open_redis(f"redis://127.0.0.1:{redis_server.port}/999")


def test_a_restarted_server_is_found_again(own_server: RedisServer) -> None:
    """While the server is gone calls fail at once; idle connections to the old server do no
    harm."""
    storage = open_redis(url_of(own_server, ":open%20sesame"))
    keys = make_keys(2)
    write_run(storage, keys, BLOCK_BYTES)

    own_server.stop()
    with pytest.raises(StorageError, match="redis://"):
        read_run(storage, keys, BLOCK_BYTES)
    with pytest.raises(StorageError):
        storage.contains([keys], timeout_s=5)[0]

    own_server.start()
    assert read_run(storage, keys, BLOCK_BYTES) == [BlockRead.ABSENT] * 2
    assert write_run(storage, keys, BLOCK_BYTES) == [BlockWrite.WRITTEN] * 2
    own_server.stop()
    own_server.start()
    assert storage.contains([keys], timeout_s=5)[0] == 0, "the idle connection was dead"
    storage.close()


def test_a_full_server_refuses_writes(own_server: RedisServer) -> None:
    """The refusal is counted, without an error, and stored blocks are served (lesson 43)."""
    storage = open_redis(url_of(own_server, ":open%20sesame"))
    keys = make_keys(400)

    outcomes = write_run(storage, keys, BLOCK_BYTES)

    assert set(outcomes) == {BlockWrite.WRITTEN, BlockWrite.REFUSED}
    refused = outcomes.count(BlockWrite.REFUSED)
    assert storage.stats().reasons == {"no_room": refused}
    assert storage.contains([keys], timeout_s=5)[0] == outcomes.index(BlockWrite.REFUSED)
    storage.close()


def test_a_server_that_evicts_stays_within_its_memory(tmp_path: Path) -> None:
    """Every write is accepted and old blocks are evicted, even between lookup and read: then
    they are absent, without an error (lesson 43)."""
    server = RedisServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    storage = open_redis(server.url)
    runs = [make_keys(20, run=f"{number}") for number in range(20)]

    for run in runs:
        assert write_run(storage, run, BLOCK_BYTES) == [BlockWrite.WRITTEN] * 20

    found = storage.contains(runs, timeout_s=5)
    assert 0 < sum(found) < 400
    outcomes = {outcome for run in runs for outcome in read_run(storage, run, BLOCK_BYTES)}
    assert outcomes == {BlockRead.READ, BlockRead.ABSENT}
    assert storage.stats().reasons == {}
    storage.close()
    server.stop()


def test_a_block_lives_for_its_time_after_it_was_last_read(redis_server: RedisServer) -> None:
    """The server expires a block, and reading the block renews its time (lesson 43)."""
    storage = open_redis(redis_server.url, ttl_s=1000.0, key_prefix="ttl:")
    keys = make_keys(2)
    write_run(storage, keys, BLOCK_BYTES)
    deadline = storage._deadline(5.0)

    def shorten(link: RespConnection, deadline: Deadline) -> None:
        name = storage._name(keys[0])
        link.send([command(b"PEXPIRE", name, b"5000")], deadline)
        link.reply(deadline)

    def left_ms() -> list[int]:
        return storage._with_connection(
            lambda link: [int(ms[1:]) for ms in storage._ask(link, b"PTTL", keys, deadline)],
            deadline,
        )

    assert all(900_000 < ms <= 1_000_000 for ms in left_ms())
    storage._with_connection(lambda link: shorten(link, deadline), deadline)
    assert left_ms()[0] <= 5000
    assert read_run(storage, keys, BLOCK_BYTES) == [BlockRead.READ] * 2
    assert all(ms > 900_000 for ms in left_ms())
    storage.remove(keys, timeout_s=5)
    storage.close()


def connect(listener: socket.socket) -> RedisStorage:
    """A backend on a fake server, without the check at start."""
    url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
    return RedisStorage(RedisConfig(url=url), FORM, SystemClock())


def test_a_server_that_does_not_answer_costs_the_timeout_only() -> None:
    """The buffer is quiet: a late answer cannot reach it (lessons 18, 38)."""
    listener = socket.create_server(("127.0.0.1", 0))
    done = Event()

    def greet_and_hang() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(b"+OK\r\n")
            done.wait(30.0)

    server = Thread(target=greet_and_hang, daemon=True)
    server.start()
    storage = connect(listener)

    with pytest.raises(StorageTimeout) as caught:
        read_run_within(storage, 0.05)

    assert caught.value.quiet is None
    done.set()
    server.join()
    storage.close()
    listener.close()


def read_run_within(storage: RedisStorage, timeout_s: float) -> None:
    storage.read(make_keys(1), [memoryview(bytearray(BLOCK_BYTES))], timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("call", "answers"),
    [
        (lambda storage: read_run_within(storage, 5.0), (b"+OK\r\n", b"x" * 3000)),
        (lambda storage: storage.remove(None, timeout_s=5), 2 * (b"*2\r\n$1\r\n0\r\n*x\r\n",)),
        (lambda storage: storage.remove(None, timeout_s=5), 2 * (b"*2\r\n$99999999999\r\n",)),
    ],
)
def test_replies_that_are_not_redis_are_an_error(
    call: Callable[[RedisStorage], object], answers: tuple[bytes, bytes]
) -> None:
    """An invalid protocol is distinguished from a miss; nothing is guessed and no memory is
    taken (lesson 18)."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        for answer in answers:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(ConnectionError):
                peer.recv(1000)
                peer.sendall(b"+OK\r\n")
                peer.recv(1000)
                peer.sendall(answer)
                peer.recv(1000)

    server = Thread(target=talk, daemon=True)
    server.start()
    storage = connect(listener)

    with pytest.raises(StorageError):
        call(storage)

    storage.close()
    server.join()
    listener.close()


@pytest.mark.slow
def test_large_batches_do_not_flood_the_server(redis_server: RedisServer) -> None:
    """Only a limited number of answers is requested ahead; the order is kept."""
    form = make_format(block_bytes=1 << 20)
    storage = open_storage(
        "redis", {"url": redis_server.url, "key_prefix": "big:"}, Opening(format=form)
    )
    keys = make_keys(24)
    write_run(storage, keys[:20], 1 << 20)

    outcomes = read_run(storage, keys, 1 << 20)

    assert outcomes == [BlockRead.READ] * 20 + [BlockRead.ABSENT] * 4
    storage.remove(keys, timeout_s=5)
    storage.close()


def test_a_closed_backend_opens_no_connection(redis_server: RedisServer) -> None:
    """Closing twice is safe; a later call is an error, not a new connection."""
    storage = open_redis(redis_server.url)
    storage.close()
    storage.close()

    with pytest.raises(StorageError, match="closed"):
        storage.contains([make_keys(1)], timeout_s=1)[0]
