"""Accepts the connections of a socket that several HTTP workers share, so that each gets about as
many.

A connection stays with its worker, and clients keep connections open. The kernel wakes all
workers for a new connection, and the fastest takes it, often several in a row. So a worker that
has more connections than another one leaves a new connection to the others for a moment. If no
other worker has accepted it by then, because they are busy or hang, the worker takes it itself,
and further ones at once until another worker accepts or loses a connection.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from headwater.server.connection_counts import ConnectionCounts

log = logging.getLogger(__name__)

_MAX_LEAD = 1
"""Connections that a worker may have more than another one and still accept at once."""

_YIELD_S = 0.005
"""How long a connection is left to the other workers."""

_MAX_TOGETHER = 64
"""Maximum number of connections that a single worker accepts in one turn of the event loop. The
loop must then close the connections that were dropped to make room."""

_RETRY_S = 1.0
"""Pause after an error, such as too many open files."""


class CountedConnection(asyncio.Protocol):
    """A protocol that is counted from `accepted` on, before TLS is negotiated: a client that
    opens connections and negotiates nothing is limited like any other."""

    def accepted(self, address: str, drop: Callable[[], None]) -> bool:
        """Count the connection; False when there is no room for it. Until `connection_made`,
        `drop` ends it."""
        raise NotImplementedError

    def ended(self) -> None:
        """Stop counting a connection that ended before `connection_made`."""
        raise NotImplementedError


class BalancedListener:
    """Accepts on one event loop until it is closed. The owner closes the socket."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], CountedConnection],
        counts: ConnectionCounts,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`make_protocol` returns protocols that are counted in `counts`."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._counts = counts
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], socket.socket] = {}
        """Accepted connections whose TLS is being negotiated."""
        self._num_others: int | None = None
        """Number of connections that the other workers had when one was left to them."""
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        listener.setblocking(False)
        self._loop.add_reader(listener, self._on_ready)

    def close(self) -> None:
        """Stop accepting, and end connections that are being opened. Calling it twice is
        safe."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        for connection in self._opening.values():
            _shut_down(connection)

    async def wait_closed(self) -> None:
        """Wait for the connections that are being opened."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _on_ready(self) -> None:
        """Accept connections that wait, or leave them to the other workers for a moment."""
        if self._counts.is_alone:  # nothing to balance: take those that wait
            for _ in range(_MAX_TOGETHER):
                if not self._accept():
                    break
            return
        if self._counts.lead > _MAX_LEAD and self._num_others != self._counts.num_others:
            self._num_others = self._counts.num_others
            self._pause_for(_YIELD_S)
            return
        self._accept()

    def _accept(self) -> bool:
        """Accept one connection. Returns whether there was one."""
        try:
            connection, peer = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as exc:
            log.error("cannot accept a connection: %s; trying again in %g s", exc, _RETRY_S)
            self._pause_for(_RETRY_S)
            return False
        protocol = self._make_protocol()
        if not protocol.accepted(peer[0], partial(_shut_down, connection)):
            connection.close()
            return True
        opening = self._loop.create_task(self._open(connection, protocol))
        self._opening[opening] = connection
        opening.add_done_callback(self._opening.pop)
        return True

    async def _open(self, connection: socket.socket, protocol: CountedConnection) -> None:
        connection.setblocking(False)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls
            )
        except OSError as exc:  # the client is gone, or TLS was refused
            log.debug("a connection could not be opened: %s", exc)
            protocol.ended()
            connection.close()

    def _pause_for(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._on_ready)


def _shut_down(connection: socket.socket) -> None:
    """End a connection. The loop, which may use it, sees its end and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
