"""A bound socket. It is bound before the model is loaded, so that a port in use is reported at
once. HTTP workers inherit it, so the port stays open while any of them is replaced."""

import errno
import socket

from headwater.errors import ConfigError

_BACKLOG = 2048


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
        raise ConfigError(
            f"cannot bind {host}:{port}: {exc.strerror or exc}; choose another --host or --port"
        ) from exc
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """The URL for clients on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
