"""Limits on HTTP connections, applied before a request is authenticated.

There are limits on the number of connections in total and per address, the bytes of headers,
the time to send headers and body, and the requests sent ahead of their responses (pipelining).
When all connections are in use, the one that has waited longest without a request is closed for
a new one, so that a client that opens many and sends nothing cannot keep others out.
"""

import asyncio
import resource
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headwater.clock import Clock
from headwater.config import is_loopback
from headwater.server.balanced_listener import CountedConnection
from headwater.server.config import ConnectionLimits
from headwater.server.connection_counts import ConnectionCounts
from headwater.server.errors import ErrorAnswer, ErrorObject

_MAX_PIPELINED = 16
_SWEEP_S = 0.5
_RESERVED_FILES = 128
"""File descriptors kept for the process itself: the engine, storage, the router."""


class _Phase(Enum):
    IDLE = auto()
    """The connection is between two requests. uvicorn's keep-alive timeout ends it."""
    HEADERS = auto()
    BODY = auto()
    RESPONSE = auto()
    """The request is complete; its response may take any time."""


class ConnectionGuard:
    """The open connections of one process. Used on its event loop only."""

    def __init__(
        self, limits: ConnectionLimits, clock: Clock, counts: ConnectionCounts | None = None
    ) -> None:
        """`counts` has the connections of all HTTP workers; without it there is one process."""
        self.limits = limits
        self.clock = clock
        self.counts = counts or ConnectionCounts.alone()
        self.max_own = _max_files() - _RESERVED_FILES
        """Maximum number of connections of this process, whatever the limits."""
        self.num_refused = 0
        """Connections closed at once because a limit was reached."""
        self._open: OrderedDict[GuardedProtocol, None] = OrderedDict()
        """In the order in which they were accepted, or sent their last response."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, connection: "GuardedProtocol") -> bool:
        """Count a new connection; False when it must be closed."""
        if not self._has_place(connection.address):
            self.num_refused += 1
            return False
        self._open[connection] = None
        self.counts.add(connection.address, 1)
        return True

    def has(self, connection: "GuardedProtocol") -> bool:
        """Whether a connection is counted."""
        return connection in self._open

    def renew(self, connection: "GuardedProtocol") -> None:
        """Note that a connection has sent a response: connections that wait longer are closed
        before it."""
        if connection in self._open:
            self._open.move_to_end(connection)

    def remove(self, connection: "GuardedProtocol") -> None:
        """Forget a connection that has ended."""
        if connection in self._open:
            del self._open[connection]
            self.counts.add(connection.address, -1)

    def expire(self) -> None:
        """Close the connections whose time is up."""
        now = self.clock.now()
        for connection in [entry for entry in self._open if entry.is_overdue(now)]:
            connection.refuse(408, "the request was not sent in time; send it faster")

    async def sweep(self) -> None:
        """Call `expire` until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.expire()

    def _has_place(self, address: str) -> bool:
        limits, counts = self.limits, self.counts
        is_over = counts.of(address) >= limits.max_connections_per_address
        if is_over and not is_loopback(address):
            return False
        is_full = counts.total >= limits.max_connections or self.num_open >= self.max_own
        return not is_full or self._make_room()

    def _make_room(self) -> bool:
        """Close the connection that has waited longest without a request; False when all have
        one."""
        waiting = next((entry for entry in self._open if entry.is_waiting), None)
        if waiting is None:
            return False
        self.remove(waiting)
        waiting.abort()
        return True


class GuardedProtocol(HttpToolsProtocol, CountedConnection):
    """One connection, with limits. Its time to send headers includes the TLS handshake."""

    def __init__(self, *args: Any, guard: ConnectionGuard, **kwargs: Any) -> None:  # noqa: ANN401 -- uvicorn's own
        super().__init__(*args, **kwargs)
        self._guard = guard
        self._phase = _Phase.HEADERS
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._since_s = guard.clock.now()
        """When this phase began."""
        self._progress_s = self._since_s
        """When the last bytes of a body arrived."""
        self._is_refused = False
        self._drop: Callable[[], None] = lambda: None
        self.address = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the server waits for a request, or for the rest of its headers."""
        return self._phase in (_Phase.IDLE, _Phase.HEADERS)

    def is_overdue(self, now: float) -> bool:
        """Whether the client takes too long to send its request."""
        limits = self._guard.limits
        if self._phase is _Phase.HEADERS:
            return now - self._since_s > limits.header_timeout_s
        if self._phase is not _Phase.BODY or self.flow.read_paused:
            return False
        allowed_s = limits.body_timeout_s + self._num_body_bytes / limits.min_body_rate
        return now - self._progress_s > limits.body_timeout_s or now - self._since_s > allowed_s

    def accepted(self, address: str, drop: Callable[[], None]) -> bool:
        self.address, self._drop = address, drop
        return self._guard.admit(self)

    def ended(self) -> None:
        self._guard.remove(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._guard.has(self):  # closed for a new one meanwhile
            self._is_refused = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEADERS)
        if self._phase is _Phase.HEADERS:
            self._num_header_bytes += len(data)
        super().data_received(data)
        # Checked after parsing, because the bytes may contain the end of the headers and a
        # body.
        limit = self._guard.limits.max_header_bytes
        if self._phase is _Phase.HEADERS and self._num_header_bytes > limit:
            self.refuse(431, f"the headers are longer than {limit} bytes")
        elif len(self.pipeline) > _MAX_PIPELINED:
            self.refuse(429, f"more than {_MAX_PIPELINED} requests are sent ahead")

    def on_message_begin(self) -> None:
        if self._phase is not _Phase.HEADERS:
            self._enter(_Phase.HEADERS)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._enter(_Phase.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progress_s = self._guard.clock.now()
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._enter(_Phase.RESPONSE)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and self._phase is _Phase.RESPONSE:
            self._enter(_Phase.IDLE)
            self._guard.renew(self)

    def abort(self) -> None:
        """Close the connection at once."""
        transport: asyncio.Transport | None = self.transport
        if transport is None:  # TLS is being negotiated
            self._drop()
        else:
            transport.abort()

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error, if nothing was answered yet, and close."""
        if self._is_refused:
            return
        self._is_refused = True
        transport: asyncio.Transport | None = self.transport
        cycle: object = self.cycle  # None before the first request
        if transport is None:
            self.abort()
        elif cycle is None or self.cycle.response_complete:
            error = ErrorObject(message=message, type="invalid_request_error", code=None)
            body = msgspec.json.encode(ErrorAnswer(error=error))
            self.transport.write(
                f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
            self.transport.close()
        else:
            self.abort()

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._since_s = self._progress_s = self._guard.clock.now()
        self._num_header_bytes = self._num_body_bytes = 0


def _max_files() -> int:
    """Maximum number of file descriptors of this process, after raising the soft limit to the
    hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(soft, 2 * _RESERVED_FILES)
