"""Control connections between instances: authenticated, numbered, limited in size.

Both ends prove that they have the shared token, then exchange their identity: instances with
different models or block layouts refuse each other. Each connection has a reading and a writing
thread; they talk to the engine loop only by posting events. A malformed message ends its
connection and nothing else.

A connection that has not proved the token costs a thread and a socket for at most
`greeting_timeout_s`. There is a limit on such connections, and the oldest one is closed for a new
one, so a stranger that keeps many open can neither use up `max_peers` nor keep peers out.
"""

import contextlib
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from threading import Event, Lock, Thread

from headwater.clock import Clock
from headwater.disagg.peering.authenticated import AuthenticatedFrames
from headwater.disagg.peering.handshake import (
    HandshakeResult,
    HandshakeTerms,
    LinkSession,
    ServerHandshake,
    client_handshake,
    timeout_check,
)
from headwater.disagg.peering.network import PeerLost, PeerMessage
from headwater.disagg.peering.stream import (
    TICK_S,
    Stream,
    WaitCheck,
    advertised_address,
    listen,
)
from headwater.disagg.peering.tls import open_tls
from headwater.disagg.protocol.codec import MAX_BODY_BYTES, decode, encode, load_object
from headwater.disagg.protocol.errors import LinkBroken, Malformed
from headwater.disagg.protocol.messages import Message, Reason
from headwater.disagg.protocol.push import PushFailure
from headwater.errors import ConfigError

log = logging.getLogger(__name__)

_VERSION = 1
_MAX_HELLO_BYTES = 4096
_MAX_UNSENT_BYTES = 4 * MAX_BODY_BYTES
_STALL_S = 10.0

Post = Callable[[object], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Settings of the control connections of one instance."""

    token: bytes
    """The secret that all instances of a deployment share."""

    identity: bytes
    """Hash of everything that decides the bytes of a block."""

    block_bytes: int
    host: str = "127.0.0.1"
    port: int = 0
    """Address to listen on; port 0 takes a free one."""

    advertised_host: str | None = None
    advertised_port: int | None = None
    """Address that is told to peers, if it differs from the one to listen on."""

    max_peers: int = 64
    """Maximum number of authenticated connections that other instances made."""

    max_unauthenticated: int = 64
    """Maximum number of connections that have not proved the token yet."""

    connect_timeout_s: float = 2.0
    greeting_timeout_s: float = 2.0
    """Longest time from a connection to the end of its handshake."""

    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    """PEM files for mutual TLS; without them connections are not encrypted."""


class _Mismatch(LinkBroken):
    """The peer has another model, KV layout or block size."""


class PeerService:
    """The `Network` of an instance. `send` is called from the loop's thread only."""

    def __init__(self, config: PeerConfig, post: Post, clock: Clock) -> None:
        if not config.token:
            raise ConfigError(
                "peers need a token that all instances share; set HEADWATER_PEER_TOKEN"
            )
        self._config = config
        self._post = post
        self._clock = clock
        self._tls = open_tls(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        self._lock = Lock()
        self._connections: dict[str, _Connection] = {}
        """Outbound connections by address, and authenticated inbound ones by name."""

        self._unauthenticated: dict[int, _Connection] = {}
        """Inbound connections during their handshake, oldest first."""

        self._numbers = count(1)
        self._closed = Event()
        self._listener = listen(config.host, config.port)
        self.address = advertised_address(
            self._listener, config.host, config.advertised_host, config.advertised_port
        )
        """The address for peers, HOST:PORT."""
        Thread(target=self._accept, name="peer-accept", daemon=True).start()

    def send(self, peer: str, message: Message) -> int:
        with self._lock:
            connection = self._connections.get(peer)
            if connection is None:
                if self._closed.is_set() or peer.startswith(_INBOUND):
                    return 0
                connection = _Connection(self, peer, next(self._numbers), None)
                self._connections[peer] = connection
        connection.put(encode(message))
        return connection.number

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            connections = [*self._connections.values(), *self._unauthenticated.values()]
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            connection.shut()

    def admit(self, connection: "_Connection") -> bool:
        """Admit an inbound connection, which has proved the token. False if there are
        `max_peers` already."""
        with self._lock:
            self._unauthenticated.pop(connection.number, None)
            inbound = sum(name.startswith(_INBOUND) for name in self._connections)
            if self._closed.is_set() or inbound >= self._config.max_peers:
                return False
            self._connections[connection.name] = connection
            return True

    def forget(self, connection: "_Connection", reason: Reason) -> None:
        """Remove a connection that has ended, and post its loss. Called once for each
        connection."""
        with self._lock:
            self._unauthenticated.pop(connection.number, None)
            is_known = self._connections.get(connection.name) is connection
            if is_known:
                del self._connections[connection.name]
            closed = self._closed.is_set()
        if is_known and not closed:
            self._post(PeerLost(connection.name, reason, connection.number))

    def deliver(self, connection: "_Connection", message: Message) -> None:
        """Post a message of a peer."""
        self._post(PeerMessage(connection.name, message, connection.number))

    def terms(self) -> HandshakeTerms:
        """What both ends have to agree on before the first message."""
        return HandshakeTerms("peer", self._config.token, self._config.block_bytes)

    def greeting_check(self) -> WaitCheck:
        """A check that limits the time of a whole handshake."""
        return timeout_check(self._clock, self._config.greeting_timeout_s)

    def stall_check(self) -> WaitCheck:
        """Limits the time of one message, from its first byte on."""
        return timeout_check(self._clock, _STALL_S)

    def dial(self, address: str) -> Stream:
        """Connect to a peer. LinkBroken if nothing listens."""
        host, _, port = address.rpartition(":")
        try:
            number = int(port)
            connected = socket.create_connection(
                (host.strip("[]"), number), self._config.connect_timeout_s
            )
        except (OSError, ValueError, OverflowError) as exc:
            sentence = f"cannot connect to peer {address!r}: {exc}"
            raise LinkBroken(sentence, PushFailure.UNREACHABLE) from exc
        return Stream(connected)

    def secure(self, stream: Stream, check_wait: WaitCheck, *, is_client: bool) -> Stream:
        """`stream` with TLS, if it is configured."""
        if self._tls is None:
            return stream
        handshake = self._tls.connect if is_client else self._tls.accept
        return handshake(stream, check_wait)

    def hello(self) -> bytes:
        """The identity of this instance, as sent to peers."""
        shape = {"version": _VERSION, "identity": self._config.identity.hex()}
        return json.dumps(shape).encode()

    def check_hello(self, body: bytes) -> None:
        """Raise unless the peer has the same protocol version and the same block layout."""
        shape = load_object(body)
        if shape.get("version") != _VERSION:
            raise Malformed(
                f"the peer has another protocol version than {_VERSION}", PushFailure.REFUSED
            )
        if shape.get("identity") != self._config.identity.hex():
            raise _Mismatch("the peer has another model, KV layout or block size")

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connected, _ = self._listener.accept()
                stream = Stream(connected)
            except OSError as exc:
                # For example no free file descriptor. That lasts, so wait instead of spinning.
                if not self._closed.wait(TICK_S):
                    log.warning("cannot accept a peer connection: error=%s", exc)
                continue
            self._greet(stream)

    def _greet(self, stream: Stream) -> None:
        """Start the handshake of a new connection. If there are too many, close the oldest one."""
        oldest = None
        with self._lock:
            if self._closed.is_set():
                stream.close()
                return
            waiting = self._unauthenticated
            if len(waiting) >= self._config.max_unauthenticated:
                oldest = waiting.pop(next(iter(waiting)))
            number = next(self._numbers)
            waiting[number] = _Connection(self, f"{_INBOUND}{number}", number, stream)
        if oldest is not None:
            oldest.shut()


_INBOUND = "peer-"
"""Prefix of the names of inbound connections."""

_CLOSE = b""


class _Connection:
    """One connection, from its first byte to its last, with two threads."""

    def __init__(
        self, service: PeerService, name: str, number: int, stream: Stream | None
    ) -> None:
        """Without a `stream`, `name` is an address to connect to."""
        self.name = name
        self.number = number
        self._service = service
        self._stream = stream
        self._unsent: SimpleQueue[bytes] = SimpleQueue()
        self._num_unsent_bytes = 0
        self._lock = Lock()
        self._shut = False
        self._writer: Thread | None = None
        Thread(target=self._live, name=f"peer {name}", daemon=True).start()

    def put(self, body: bytes) -> None:
        """Queue a message. A peer that does not read its messages is disconnected."""
        with self._lock:
            self._num_unsent_bytes += len(body)
            too_many = self._num_unsent_bytes > _MAX_UNSENT_BYTES
        if too_many:
            self.shut()
        else:
            self._unsent.put(body)

    def shut(self) -> None:
        """End the connection; its threads notice and return."""
        self._shut = True
        self._unsent.put(_CLOSE)
        if self._stream is not None:
            self._stream.shut()

    def _live(self) -> None:
        reason = Reason.LOST
        try:
            self._serve()
        except _Mismatch as exc:
            reason = Reason.FINGERPRINT
            log.warning("peer refused: peer=%s reason=%s", self.name, exc)
        except LinkBroken as exc:
            reason = _REASONS.get(exc.reason, Reason.LOST)
            level = logging.WARNING if isinstance(exc, Malformed) else logging.DEBUG
            log.log(level, "peer connection ended: peer=%s reason=%s", self.name, exc)
        except Exception:
            log.exception("peer connection ended by a bug: peer=%s", self.name)
        finally:
            self._end()
            self._service.forget(self, reason)

    def _end(self) -> None:
        """Release the socket after both threads have stopped using it."""
        self._unsent.put(_CLOSE)
        if self._stream is not None:
            self._stream.shut()
        if self._writer is not None:
            self._writer.join()
        if self._stream is not None:
            self._stream.close()

    def _serve(self) -> None:
        service, is_client = self._service, self._stream is None
        socket_stream = self._stream = self._stream or service.dial(self.name)
        if self._shut:
            socket_stream.shut()
        check_wait = service.greeting_check()
        stream = service.secure(socket_stream, check_wait, is_client=is_client)
        session = self._handshake(stream, check_wait, is_client=is_client)
        frames = AuthenticatedFrames(stream, session.key, is_client=is_client)
        frames.send(service.hello(), check_wait)
        service.check_hello(frames.receive(check_wait, _MAX_HELLO_BYTES))
        name = f"peer {self.name} out"
        self._writer = Thread(target=self._write, args=(frames,), name=name, daemon=True)
        self._writer.start()
        while True:
            stream.await_readable()
            body = frames.receive(service.stall_check(), MAX_BODY_BYTES)
            service.deliver(self, decode(body))

    def _handshake(
        self, stream: Stream, check_wait: WaitCheck, *, is_client: bool
    ) -> LinkSession:
        if is_client:
            return client_handshake(stream, self._service.terms(), check_wait)
        handshake = ServerHandshake(stream, self._service.terms(), check_wait)
        if not self._service.admit(self):
            handshake.refuse(HandshakeResult.BUSY)
        return handshake.accept()

    def _write(self, frames: AuthenticatedFrames) -> None:
        try:
            while (body := self._unsent.get()) is not _CLOSE:
                frames.send(body, self._service.stall_check())
                with self._lock:
                    self._num_unsent_bytes -= len(body)
        except LinkBroken as exc:
            log.debug("cannot send to peer: peer=%s reason=%s", self.name, exc)
        finally:
            frames.stream.shut()


_REASONS = {
    PushFailure.UNREACHABLE: Reason.UNREACHABLE,
    PushFailure.REFUSED: Reason.DENIED,
}
