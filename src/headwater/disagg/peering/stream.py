"""A connected socket that moves buffers without copying them. Each call ends within a tick.

The tick is the kernel's timeout (`SO_RCVTIMEO`) and not Python's. Python's timeout would make the
socket non-blocking: each piece of a payload would then take a poll and a call.
"""

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Sequence

from headwater.disagg.protocol.errors import LinkBroken
from headwater.disagg.protocol.push import PushFailure
from headwater.errors import ConfigError
from headwater.storage.calls import advance

TICK_S = 0.02
"""Longest time in one system call, and so the delay with which a fence or deadline is noticed.
"""

_WILDCARDS = frozenset({"", "*", "0.0.0.0", "::"})

_MAX_PARTS = 512  # parts of one call; the kernel allows 1024

WaitCheck = Callable[[], None]
"""Called once per tick while a wait makes no progress. It raises to end the wait."""


class Stream:
    """One connection. One thread receives and one sends; any thread may call `shut`."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.num_received = 0
        """Bytes received so far."""

        connected.settimeout(None)
        timeval = struct.pack("ll", 0, int(TICK_S * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, timeval)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(connected)

    def send(self, parts: Sequence[memoryview | bytes], check_wait: WaitCheck) -> None:
        """Send all parts, in order."""
        views = [memoryview(part) for part in parts]
        while views:
            try:
                sent = self.socket.sendmsg(views[:_MAX_PARTS])
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise LinkBroken(f"connection lost: {error}") from error
            views = advance(views, sent)
            if views:
                check_wait()

    def receive_some(self, views: Sequence[memoryview], flags: int = socket.MSG_WAITALL) -> int:
        """Fill the views from their beginning; returns the number of bytes that came within a
        tick."""
        try:
            if len(views) == 1:
                got = self.socket.recv_into(views[0], 0, flags)
            else:
                got, *_ = self.socket.recvmsg_into(views[:_MAX_PARTS], 0, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkBroken(f"connection lost: {error}") from error
        if not got:
            raise LinkBroken("the peer closed the connection")
        self.num_received += got
        return got

    def fill(self, view: memoryview, check_wait: WaitCheck) -> None:
        """Receive exactly len(view) bytes."""
        while view:
            got = self.receive_some([view])
            if not got:
                check_wait()
            view = view[got:]

    def await_readable(self) -> None:
        """Sleep without limit until there is a byte or the connection has ended."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        poller.poll()

    def shut(self) -> None:
        """End both directions. It wakes every thread that waits in a call."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket. Only its last user may call this."""
        self.socket.close()


def _keep_alive(connected: socket.socket) -> None:
    """Notice within a minute that the peer's machine is gone."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 20),
        (socket.TCP_KEEPINTVL, 10),
        (socket.TCP_KEEPCNT, 3),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or ConfigError with the reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error}; choose another address or port"
        ) from error


def connect(target: tuple[str, int], timeout_s: float) -> Stream:
    """A connection without a handshake yet. LinkBroken if nothing listens."""
    try:
        return Stream(socket.create_connection(target, timeout_s))
    except OSError as error:
        reason = PushFailure.UNREACHABLE
        raise LinkBroken(f"{target[0]} port {target[1]}: {error}", reason) from error


def advertised_address(
    listener: socket.socket, host: str, advertised_host: str | None, advertised_port: int | None
) -> str:
    """HOST:PORT for peers: the address to which `listener` is bound, unless another one is
    given."""
    host = advertised_host or host
    port: int = advertised_port or listener.getsockname()[1]
    if host in _WILDCARDS:
        listener.close()
        raise ConfigError(
            f"{host} means every address of this machine, so peers cannot connect to it; set "
            "--peer-advertise-host to the address at which peers reach this instance"
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_host_port(address: str) -> tuple[str, int]:
    """Host and port of an address such as tcp://host:port."""
    host, _, port = address.partition("://")[2].rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{address!r} is not a link address; write tcp://host:port")
    return host.strip("[]"), int(port)
