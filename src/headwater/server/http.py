"""The HTTP process: a bound socket, uvicorn on it, and an end that drains.

The socket is bound before the model is loaded, so that a taken port is known at once.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from headwater.errors import ConfigError

_BACKLOG = 2048
_KEEP_ALIVE_S = 65
"""Longer than the usual idle limit of clients and proxies, so that they close first."""

_CLOSE_S = 5
"""For answers to requests that were just ended."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or a ConfigError that says what is in the way."""
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


def url_of(listener: socket.socket) -> str:
    """Where clients on this machine reach it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn that leaves signals to its owner, and ends when told to."""

    def __init__(self, app: ASGIApp, *, drain_timeout_s: float) -> None:
        """The owner ends what still runs after `drain_timeout_s`; a little later uvicorn does."""
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(drain_timeout_s) + _CLOSE_S,
            )
        )

    def stop(self) -> None:
        """Refuse new connections, and end when what runs has ended."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the owner's: uvicorn would end the process with the signal, not with 0."""
        yield
