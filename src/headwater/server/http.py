"""A bound socket and the HTTP server (uvicorn) on it.

The socket is bound before the model is loaded, so that a port in use is reported at once.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from headwater.clock import SystemClock
from headwater.errors import ConfigError
from headwater.server.config import ConnectionLimits
from headwater.server.connections import ConnectionGuard, GuardedProtocol
from headwater.server.tls import TlsConfig

_BACKLOG = 2048
_KEEP_ALIVE_S = 65
"""Longer than the usual idle timeout of clients and proxies, so that they close first."""

CLOSE_S = 5
"""Time to send the responses of requests that were just aborted."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when it cannot be bound."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as exc:
        raise ConfigError(f"cannot resolve --host {host}: {exc.strerror or exc}") from exc
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop what uses it or choose another --port"
            ) from exc
        raise ConfigError(f"cannot bind {host}:{port}: {exc.strerror or exc}") from exc
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """The URL for clients on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tls: TlsConfig | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """The owner waits for running requests before `stop`; uvicorn then closes connections."""
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
        config.load()
        config.ssl = None if tls is None else tls.server_context()
        self.guard = ConnectionGuard(limits or ConnectionLimits(), SystemClock())
        config.http_protocol_class = partial(GuardedProtocol, guard=self.guard)  # type: ignore[assignment]  # called as a class
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`, closing connections whose time is up."""
        sweep = asyncio.create_task(self.guard.sweep())
        try:
            await super().serve(sockets)
        finally:
            sweep.cancel()

    def stop(self, *, at_once: bool = False) -> None:
        """Refuse new connections and end within `CLOSE_S`, or at once with connections open."""
        self.should_exit = True
        self.force_exit |= at_once

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The owner handles signals: uvicorn would exit with the signal instead of 0."""
        yield
