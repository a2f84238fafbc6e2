"""Connections are limited before anything is authenticated."""

import asyncio
import contextlib
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.clock import SystemClock, VirtualClock
from headwater.server.access import make_access_policy
from headwater.server.app import create_app
from headwater.server.config import ConnectionLimits, ServerConfig
from headwater.server.connection_counts import ConnectionCounts, make_counts_file
from headwater.server.connections import ConnectionGuard, GuardedProtocol, _Phase
from headwater.server.http import HttpServer
from headwater.server.listener import bind
from headwater.server.middleware import ReadinessMiddleware
from tests.server.harness import Harness

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Live:
    """A server with an echo engine on a real socket."""

    def __init__(self, tls=None, **limits):
        self.harness = Harness()
        config = ServerConfig()
        readiness = ReadinessMiddleware(
            make_access_policy(config, SystemClock(), lambda: 1.7e9)
        )
        readiness.open(create_app(self.harness.service))
        self.listener = bind("127.0.0.1", 0)
        self.http = HttpServer(readiness, tls=tls, limits=ConnectionLimits(**limits))
        self.context = None if tls is None else tls.client_context()
        self.address = self.listener.getsockname()

    async def __aenter__(self):
        self.task = asyncio.create_task(self.http.serve(sockets=[self.listener]))
        await self.ask(HEALTH)
        return self

    async def __aexit__(self, *error):
        self.http.force_exit = True
        self.http.stop()
        await self.task
        self.listener.close()
        await self.harness.client.aclose()
        self.harness.service.close()

    async def open(self, data=b""):
        reader, writer = await asyncio.open_connection(*self.address, ssl=self.context)
        writer.write(data)
        return reader, writer

    async def ask(self, data):
        """The first bytes of the answer; empty when the connection was closed."""
        reader, writer = await self.open(data)
        try:
            async with asyncio.timeout(20):
                return await reader.read(400)
        except ConnectionError:
            return b""
        finally:
            writer.close()


def run(scenario, **limits):
    async def whole():
        async with Live(**limits) as live:
            await scenario(live)

    asyncio.run(whole())


def test_endless_headers_are_cut_off():
    """Headers above the limit get a 431, before any key is checked."""

    async def scenario(live):
        reader, writer = await live.open(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
        line = b"x-filler: " + b"a" * 1000 + b"\r\n"
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 4_000_000 and not reader.at_eof():
                writer.write(line)
                sent += len(line)
                await writer.drain()
                await asyncio.sleep(0)
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await reader.read(100)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 431") or sent < 4_000_000
        assert (await live.ask(HEALTH)).startswith(b"HTTP/1.1 200")

    run(scenario, max_header_bytes=8192)


def test_headers_that_fit_are_served():
    """The limit is not on the body that may follow in the same packet."""

    async def scenario(live):
        body = b'{"prompt":"' + b"x" * 400 + b'"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: %d\r\n\r\n"
        assert b" 200 " in await live.ask(head % len(body) + body)

    run(scenario, max_header_bytes=256)


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-a: ",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half of the headers", "half of a body"],
)
def test_a_request_that_is_never_finished_is_ended(beginning):
    """Connections of such a slow-loris client are closed after a while."""

    async def scenario(live):
        reader, writer = await live.open(beginning)
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()

    run(scenario, header_timeout_s=0.2, body_timeout_s=0.2)


def test_half_open_connections_do_not_keep_others_out():
    """With every connection in use, the one that waits longest is closed for a new client."""

    async def scenario(live):
        half = [await live.open(b"GET /health HTTP/1.1\r\nX-a: ") for _ in range(40)]
        assert live.http.guard.num_open <= 8
        for _ in range(10):
            assert (await live.ask(HEALTH)).startswith(b"HTTP/1.1 200")
        for _, writer in half:
            writer.close()

    run(scenario, max_connections=8)


def test_a_connection_that_was_used_lately_is_closed_last():
    """A client that keeps its connection loses it later than clients that send nothing."""

    async def scenario(live):
        reader, writer = await live.open(HEALTH)
        first = await reader.readuntil(b"}")
        idle = [await live.open() for _ in range(2)]
        writer.write(HEALTH)
        assert await reader.readuntil(b"}") == first
        idle += [await live.open() for _ in range(2)]
        writer.write(HEALTH)
        assert await reader.readuntil(b"}") == first
        for _, other in (*idle, (reader, writer)):
            other.close()

    run(scenario, max_connections=3)


def test_a_stream_continues_when_idle_clients_take_every_connection():
    """Only connections without a request are closed for new ones."""

    async def scenario(live):
        live.harness.engine.hold()
        body = b'{"prompt":"hello","stream":true,"max_tokens":4}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: %d\r\n\r\n"
        reader, writer = await live.open(head % len(body) + body)
        await live.harness.until_live(1)
        strangers = [await live.open() for _ in range(20)]
        live.harness.engine.flow()
        async with asyncio.timeout(20):
            answer = await reader.readuntil(b"[DONE]")
        assert b" 200 " in answer
        writer.close()
        for _, other in strangers:
            other.close()

    run(scenario, max_connections=4)


def test_requests_sent_ahead_are_bounded():
    """A client that pipelines hundreds of requests is cut off."""

    async def scenario(live):
        reader, writer = await live.open(HEALTH * 500)
        answer = b""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1 << 16):
                    answer += piece
        writer.close()
        assert answer.count(b"HTTP/1.1 200") < 100
        assert (await live.ask(HEALTH)).startswith(b"HTTP/1.1 200")

    run(scenario)


def test_a_body_that_trickles_in_is_ended():
    """The pauses in the body are short, but it is slower than the slowest rate."""
    limits = ConnectionLimits(body_timeout_s=10.0, min_body_rate=1000)
    connection: Any = GuardedProtocol.__new__(GuardedProtocol)
    connection._guard = ConnectionGuard(limits, VirtualClock())
    connection.flow = SimpleNamespace(read_paused=False)
    connection._phase = _Phase.BODY
    connection._since_s, connection._progress_s = 0.0, 99.0

    connection._num_body_bytes = 5000
    assert connection.is_overdue(100.0)
    connection._num_body_bytes = 95_000
    assert not connection.is_overdue(100.0)


class FakeConnection:  # what the guard checks
    def __init__(self, address):
        self.address = address
        self.is_waiting = False


def fake(address: str) -> Any:
    return FakeConnection(address)


def test_one_address_gets_its_share_of_connections_only():
    """Loopback, where proxies are, is not limited."""
    guard = ConnectionGuard(ConnectionLimits(max_connections_per_address=3), SystemClock())

    def opened(address):
        return [guard.admit(fake(address)) for _ in range(5)].count(True)

    assert opened("10.0.0.9") == 3
    assert opened("10.0.0.8") == 3
    assert opened("127.0.0.1") == 5
    assert guard.num_refused == 4


def test_limits_hold_for_all_workers_together():
    """The limits hold however the kernel distributes connections, and after a worker was
    replaced."""
    file = make_counts_file(2)
    limits = ConnectionLimits(max_connections=8, max_connections_per_address=3)

    def worker(index):
        return ConnectionGuard(limits, SystemClock(), ConnectionCounts(file, index))

    def opened(guard, address, number=5):
        made = [fake(address) for _ in range(number)]
        return [entry for entry in made if guard.admit(entry)]

    first, second = worker(0), worker(1)
    ended = opened(first, "10.0.0.9", 2)
    assert len(opened(second, "10.0.0.9")) == 1
    assert len(opened(second, "10.0.0.8")) == 3
    assert len(opened(first, "127.0.0.1")) == 2  # eight in all
    first.remove(ended[0])
    assert len(opened(second, "10.0.0.9")) == 1

    replaced = worker(0)  # its three connections ended with it
    assert len(opened(replaced, "10.0.0.7")) == 3
    os.close(file)


def test_the_last_file_descriptors_are_not_for_clients(monkeypatch):
    """A limit above what the system allows is not reached."""
    monkeypatch.setattr("resource.getrlimit", lambda kind: (300, 300))
    monkeypatch.setattr("resource.setrlimit", lambda kind, values: None)
    guard = ConnectionGuard(ConnectionLimits(max_connections=100_000), SystemClock())
    admitted = [guard.admit(fake("127.0.0.1")) for _ in range(300)].count(True)
    assert admitted == 300 - 128


def test_a_port_is_a_socket_of_this_machine():
    """The default listener is on loopback."""
    with contextlib.closing(bind(ServerConfig().host, 0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.family is socket.AF_INET
