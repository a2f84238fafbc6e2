"""One connection to a Redis or Valkey server; payloads are read and written in place.

Speaks RESP2 over a plain or TLS socket. Bytes of a block go from the caller's buffer to the
kernel and back without a copy in between. Every wait ends at the call's deadline. After any
error except ReplyError a part of a reply may be unread, so the connection must be closed.
"""

import contextlib
import re
import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from headwater.errors import ConfigError, StorageError, StorageTimeout
from headwater.storage.calls import Deadline, advance

Part = bytes | bytearray | memoryview

_LINE_BYTES = 1024
_MAX_SMALL_BYTES = 1 << 20
"""Longest value that is read into separate memory: a name, a cursor, a description."""

_LENGTH = re.compile(rb"\d{1,10}")
"""A length or count, of at most 10 digits. `int` would also accept longer ones, which are
invalid."""

_MAX_PARTS = 512  # parts of one sendmsg; the kernel allows 1024
_TICK_S = 0.05  # longest time in one system call; the deadline is checked in between


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a server, and the user to log in as."""

    host: str
    port: int
    user: str | None = None
    password: str | None = None
    db: int = 0
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> "Address":
        """The address in a URL: redis://[user:password@]host[:port][/db], or rediss:// for
        TLS."""
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise _no_url(url) from error
        if "sentinel" in parts.scheme or "cluster" in parts.scheme:
            raise ConfigError(
                f"{_masked(url)!r}: Redis Sentinel and cluster mode are not supported; give the "
                "address of one server: redis://[user:password@]host[:port][/db]"
            )
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise _no_url(url)
        db = parts.path.strip("/")
        if db and not db.isdigit():
            raise ConfigError(f"the database in a Redis URL must be a number, got {db!r}")
        try:
            port = parts.port or 6379
        except ValueError as error:
            raise ConfigError(
                f"{_masked(url)!r} has no valid port; write a number from 1 to 65535"
            ) from error
        if parts.username and not parts.password:
            raise ConfigError(
                f"{_masked(url)!r} has a user and no password; write redis://user:password@host"
            )
        return cls(
            host=parts.hostname,
            port=port,
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            db=int(db or 0),
            tls=parts.scheme == "rediss",
        )

    def __str__(self) -> str:
        """The address without the password."""
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.db}"


class ReplyError(StorageError):
    """The server answered with an error; the connection can still be used."""


class AuthError(StorageError):
    """The server refused the login."""


class RespConnection:
    """An open connection, logged in. One thread uses it at a time."""

    def __init__(
        self, address: Address, tls: ssl.SSLContext | None, connect_s: float, deadline: Deadline
    ) -> None:
        """Connect within `connect_s` and the deadline. Raises StorageError if that fails."""
        self.address = address
        self._line = bytearray(_LINE_BYTES)
        self._start = self._end = 0
        self._bounds: dict[int, float] = {}
        try:
            self._socket = _connect(address, tls, min(connect_s, deadline.left_s()))
        except OSError as error:
            raise _lost(address, error) from error
        self._tls = tls is not None
        try:
            self._log_in(deadline)
        except BaseException:
            self.close()
            raise

    def send(self, parts: Sequence[Part], deadline: Deadline) -> None:
        """Send all parts, in order."""
        try:
            if self._tls:
                self._socket.settimeout(deadline.left_s())
                for part in parts:
                    self._socket.sendall(part)
            else:
                self._send_parts([memoryview(part) for part in parts], deadline)
        except (TimeoutError, BlockingIOError) as error:
            raise self._late() from error
        except OSError as error:
            raise _lost(self.address, error) from error

    def reply(self, deadline: Deadline, *, ahead: int = _LINE_BYTES) -> bytes:
        """One reply line, such as b"+OK", b":1" or b"$-1". Raises ReplyError for an error.

        At most `ahead` bytes are read at once: what is read beyond the line is copied later.
        """
        while (at := self._line.find(b"\r\n", self._start, self._end)) < 0:
            self._more(deadline, ahead)
        line = bytes(self._line[self._start : at])
        self._start = at + 2
        if line.startswith(b"-"):
            raise ReplyError(f"{self.address}: {line[1:].decode(errors='replace')}")
        return line

    def bulk(self, deadline: Deadline, *, ahead: int = _LINE_BYTES) -> int | None:
        """The number of bytes that follow as a value, before their CR LF; None for no value."""
        line = self.reply(deadline, ahead=ahead)
        if line == b"$-1":
            return None
        return self._length(line, b"$", "a value")

    def number(self, deadline: Deadline) -> int:
        """A count, as an integer or as the length of the array that follows."""
        return self._length(self.reply(deadline), b":*", "a number")

    def value(self, deadline: Deadline) -> bytes:
        """A small value; empty if there is none."""
        num_bytes = self.bulk(deadline) or 0
        if num_bytes > _MAX_SMALL_BYTES:
            raise StorageError(
                f"{self.address} sent {num_bytes} bytes in place of a small value"
            )
        view = memoryview(bytearray(num_bytes + 2))
        self.fill([view], deadline)
        return bytes(view[:-2])

    def scan(self, words: Sequence[bytes], deadline: Deadline) -> tuple[bytes, list[bytes]]:
        """Send a SCAN command; return the next cursor and the names it found."""
        self.send([command(*words)], deadline)
        if self.number(deadline) != 2:
            raise StorageError(f"{self.address} sent an invalid reply to SCAN")
        cursor = self.value(deadline)
        return cursor, [self.value(deadline) for _ in range(self.number(deadline))]

    def skip_reply(self, deadline: Deadline) -> None:
        """Read and drop one reply of any form. Raises ReplyError if it is an error."""
        line = self.reply(deadline)
        if line[:1] == b"$" and line != b"$-1":
            num_bytes = self._length(line, b"$", "a value")
            self.fill([memoryview(bytearray(min(num_bytes, _MAX_SMALL_BYTES) + 2))], deadline)
        elif line[:1] == b"*":
            for _ in range(self._length(line, b"*", "a number")):
                self.skip_reply(deadline)

    def _length(self, line: bytes, kinds: bytes, what: str) -> int:
        if line[:1] not in kinds or not _LENGTH.fullmatch(line[1:]):
            raise StorageError(f"{self.address} sent {line[:40]!r} in place of {what}")
        return int(line[1:])

    def fill(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Read bytes until every view is full."""
        left = list(views)
        while left and self._start < self._end:
            have = min(self._end - self._start, len(left[0]))
            left[0][:have] = self._line[self._start : self._start + have]
            self._start += have
            left = advance(left, have)
        num_bytes = sum(map(len, left))
        while num_bytes:
            got = self._receive(left, deadline, socket.MSG_WAITALL)
            num_bytes -= got
            if num_bytes:
                left = advance(left, got)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _log_in(self, deadline: Deadline) -> None:
        address = self.address
        if address.password is not None:
            user = [address.user.encode()] if address.user else []
            self.send([command(b"AUTH", *user, address.password.encode())], deadline)
            try:
                self.reply(deadline)
            except ReplyError as error:
                who = f"user {address.user!r}" if address.user else "the default user"
                raise AuthError(f"{address} refused the password of {who}") from error
        # Without a database, PING shows whether a password is needed. SELECT would too, but a
        # Sentinel does not know it.
        words = (b"SELECT", b"%d" % address.db) if address.db else (b"PING",)
        self.send([command(*words)], deadline)
        try:
            self.reply(deadline)
        except ReplyError as error:
            if "NOAUTH" in str(error):
                raise AuthError(
                    f"{address} requires a password; write redis://user:password@host"
                ) from error
            if address.db:
                raise

    def _send_parts(self, views: list[memoryview], deadline: Deadline) -> None:
        num_bytes = sum(map(len, views))
        while num_bytes:
            self._bound(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(views[:_MAX_PARTS])
            except BlockingIOError:
                deadline.left_s()
                continue
            num_bytes -= sent
            if num_bytes:
                views = advance(views, sent)

    def _more(self, deadline: Deadline, ahead: int) -> None:
        """Read more into the line buffer, which keeps only unread bytes."""
        rest = self._end - self._start
        if rest == _LINE_BYTES:
            raise StorageError(f"{self.address} sent a line that is not a reply")
        self._line[:rest] = self._line[self._start : self._end]
        self._start, self._end = 0, rest
        self._end += self._receive([memoryview(self._line)[rest : rest + ahead]], deadline, 0)

    def _receive(self, views: list[memoryview], deadline: Deadline, flags: int) -> int:
        """Receive at least one byte into the views, from the first on; return the number."""
        got = None
        while got is None:
            try:
                got = self._receive_some(views, deadline, flags)
            except BlockingIOError:
                deadline.left_s()
            except TimeoutError as error:
                raise self._late() from error
            except OSError as error:
                raise _lost(self.address, error) from error
        if not got:
            raise StorageError(f"{self.address} closed the connection")
        return got

    def _receive_some(self, views: list[memoryview], deadline: Deadline, flags: int) -> int:
        if self._tls:
            self._socket.settimeout(deadline.left_s())
            return self._socket.recv_into(views[0])
        self._bound(socket.SO_RCVTIMEO, deadline)
        if len(views) == 1:
            return self._socket.recv_into(views[0], 0, flags)
        got, *_ = self._socket.recvmsg_into(views, 0, flags)
        return got

    def _bound(self, option: int, deadline: Deadline) -> None:
        """Limit a system call to one tick, or to the rest of the deadline if that is
        shorter."""
        # The kernel's timeout, not Python's: Python's makes the socket non-blocking, and then
        # each piece of a payload needs a poll and a call.
        bound_s = min(deadline.left_s(), _TICK_S)
        if self._bounds.get(option) != bound_s:
            timeval = struct.pack("ll", 0, max(1, int(bound_s * 1e6)))
            self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)
            self._bounds[option] = bound_s

    def _late(self) -> StorageTimeout:
        return StorageTimeout(f"{self.address} did not answer in time")


def command(*words: bytes) -> bytes:
    """A command with small arguments."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def _connect(address: Address, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    plain = socket.create_connection((address.host, address.port), timeout_s)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is not None:
            return tls.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise
    plain.settimeout(None)
    return plain


def _lost(address: Address, error: OSError) -> StorageError:
    if isinstance(error, TimeoutError):
        return StorageTimeout(f"{address} did not answer in time")
    if isinstance(error, ssl.SSLEOFError) or (
        address.tls and isinstance(error, ConnectionError)
    ):
        return StorageError(
            f"{address} closed the TLS connection; it may require a client certificate of its "
            "own authority (tls_cert_file, tls_key_file)"
        )
    return StorageError(f"{address}: {error}")


def _no_url(url: str) -> ConfigError:
    return ConfigError(
        f"{_masked(url)!r} is not a Redis URL; write redis://[user:password@]host[:port][/db]"
    )


def _masked(url: str) -> str:
    """A URL without the part before the @, for messages."""
    scheme, found, rest = url.partition("://")
    return f"{scheme}{found}{rest.rpartition('@')[2]}"
