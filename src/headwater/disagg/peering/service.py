"""Control connections between instances: authenticated, sealed, numbered, limited in size.

    frame   body bytes 4 · seal 16 · body

Both ends prove that they have the shared token, then say who they are; two instances whose
blocks differ in anything have nothing to say to one another. A thread reads and a thread
writes for each connection; they speak to the loop only by posting events. A malformed message
ends its connection and nothing else.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread

from headwater.clock import Clock
from headwater.disagg.peering.handshake import (
    HandshakeTerms,
    LinkSession,
    ServerHandshake,
    client_handshake,
    timeout_check,
)
from headwater.disagg.peering.network import PeerLost, PeerMessage
from headwater.disagg.peering.stream import Stream, WaitCheck, host_port, listen
from headwater.disagg.protocol.codec import MAX_BODY_BYTES, decode, encode, load_object
from headwater.disagg.protocol.errors import LinkBroken, Malformed
from headwater.disagg.protocol.messages import Message, Reason
from headwater.disagg.protocol.push import PushFailure
from headwater.errors import ConfigError

log = logging.getLogger(__name__)

_VERSION = 1
_HEAD = struct.Struct("<I16s")
_MAX_HELLO_BYTES = 4096
_MAX_UNSENT_BYTES = 4 * MAX_BODY_BYTES
_STALL_S = 10.0

Post = Callable[[object], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """How this instance and its peers find and know one another."""

    token: bytes
    """The secret that all instances of a deployment share."""

    identity: bytes
    """Stands for all that decides what the bytes of a block are."""

    block_bytes: int
    host: str = "127.0.0.1"
    port: int = 0
    """Where peers reach this instance; 0 takes a free one."""

    max_peers: int = 64
    """Connections of others that are served at once."""

    connect_timeout_s: float = 2.0


class _Mismatch(LinkBroken):
    """The peer's blocks are not ours."""


class PeerService:
    """The `Network` of an instance. `send` is called from the loop's thread only."""

    def __init__(self, config: PeerConfig, post: Post, clock: Clock) -> None:
        if not config.token:
            raise ConfigError(
                "peers need a shared token; set HEADWATER_PEER_TOKEN or --peer-token-file on all instances"
            )
        self._config = config
        self._post = post
        self._clock = clock
        self._lock = Lock()
        self._connections: dict[str, _Connection] = {}
        self._num_accepted = 0
        self._closed = False
        self._listener = listen(config.host, config.port)
        self.address = host_port(config.host, self._listener)
        """What peers connect to, HOST:PORT."""
        Thread(target=self._accept, name="peer-accept", daemon=True).start()

    def send(self, peer: str, message: Message) -> None:
        with self._lock:
            connection = self._connections.get(peer)
            if connection is None and not self._closed and not peer.startswith(_INBOUND):
                connection = _Connection(self, peer, None)
                self._connections[peer] = connection
        if connection is not None:
            connection.put(encode(message))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            connection.shut()

    def forget(self, connection: "_Connection", reason: Reason) -> None:
        """A connection has ended; said once."""
        with self._lock:
            self._connections.pop(connection.name, None)
            closed = self._closed
        if not closed:
            self._post(PeerLost(connection.name, reason))

    def deliver(self, connection: "_Connection", message: Message) -> None:
        """A peer said something."""
        self._post(PeerMessage(connection.name, message))

    def terms(self) -> HandshakeTerms:
        """What both ends prove before anything else is said."""
        return HandshakeTerms("peer", self._config.token, self._config.block_bytes)

    def check_wait(self) -> WaitCheck:
        """For one word of a greeting."""
        return timeout_check(self._clock, self._config.connect_timeout_s)

    def stall_check(self) -> WaitCheck:
        """For the rest of a message that has begun."""
        return timeout_check(self._clock, _STALL_S)

    def dial(self, address: str) -> Stream:
        """Connect to a peer; raises LinkBroken when it is unreachable."""
        host, _, port = address.rpartition(":")
        try:
            number = int(port)
            connected = socket.create_connection(
                (host.strip("[]"), number), self._config.connect_timeout_s
            )
        except (OSError, ValueError, OverflowError) as exc:
            sentence = f"no peer at {address!r}: {exc}"
            raise LinkBroken(sentence, PushFailure.UNREACHABLE) from exc
        return Stream(connected)

    def hello(self) -> bytes:
        """Who this is."""
        shape = {"version": _VERSION, "identity": self._config.identity.hex()}
        return json.dumps(shape).encode()

    def check_hello(self, body: bytes) -> None:
        """Raise unless the peer is of the same version and has the same blocks."""
        shape = load_object(body)
        if shape.get("version") != _VERSION:
            raise Malformed("a peer of another version", PushFailure.REFUSED)
        if shape.get("identity") != self._config.identity.hex():
            raise _Mismatch("a peer with another model, layout or block size")

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
                stream = Stream(connected)
            except OSError:
                if self._closed:
                    return
                continue
            with self._lock:
                inbound = sum(name.startswith(_INBOUND) for name in self._connections)
                if self._closed or inbound >= self._config.max_peers:
                    stream.close()
                    continue
                self._num_accepted += 1
                name = f"{_INBOUND}{self._num_accepted}"
                self._connections[name] = _Connection(self, name, stream)


_INBOUND = "peer-"
"""Begins the names of connections that others made."""

_CLOSE = b""


class _Connection:
    """One connection, from its first byte to its last, in two threads."""

    def __init__(self, service: PeerService, name: str, stream: Stream | None) -> None:
        """Without a `stream`, `name` is an address to connect to."""
        self.name = name
        self._service = service
        self._stream = stream
        self._unsent: SimpleQueue[bytes] = SimpleQueue()
        self._num_unsent_bytes = 0
        self._lock = Lock()
        self._shut = False
        self._writer: Thread | None = None
        Thread(target=self._live, name=f"peer {name}", daemon=True).start()

    def put(self, body: bytes) -> None:
        """Send in order, without waiting. A peer that does not read is cut off."""
        with self._lock:
            self._num_unsent_bytes += len(body)
            too_many = self._num_unsent_bytes > _MAX_UNSENT_BYTES
        if too_many:
            self.shut()
        else:
            self._unsent.put(body)

    def shut(self) -> None:
        """End it; its threads notice."""
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
            log.warning("%s: %s", self.name, exc)
        except LinkBroken as exc:
            reason = _REASONS.get(exc.reason, Reason.LOST)
            level = logging.WARNING if isinstance(exc, Malformed) else logging.DEBUG
            log.log(level, "%s: connection dropped: %s", self.name, exc)
        except Exception:
            log.exception("%s: a connection ended by a fault of ours", self.name)
        finally:
            self._end()
            self._service.forget(self, reason)

    def _end(self) -> None:
        """The last of both threads releases the socket."""
        self._unsent.put(_CLOSE)
        if self._stream is not None:
            self._stream.shut()
        if self._writer is not None:
            self._writer.join()
        if self._stream is not None:
            self._stream.close()

    def _serve(self) -> None:
        service, is_client = self._service, self._stream is None
        stream = self._stream = self._stream or service.dial(self.name)
        if self._shut:
            stream.shut()
        session = self._handshake(stream, is_client=is_client)
        frames = _AuthenticatedFrames(stream, session.key, is_client=is_client)
        frames.send(service.hello(), service.check_wait())
        service.check_hello(frames.receive(service.check_wait(), _MAX_HELLO_BYTES))
        name = f"peer {self.name} out"
        self._writer = Thread(target=self._write, args=(frames,), name=name, daemon=True)
        self._writer.start()
        while True:
            stream.await_readable()
            body = frames.receive(service.stall_check(), MAX_BODY_BYTES)
            service.deliver(self, decode(body))

    def _handshake(self, stream: Stream, *, is_client: bool) -> LinkSession:
        terms, check_wait = self._service.terms(), self._service.check_wait()
        if is_client:
            return client_handshake(stream, terms, check_wait)
        return ServerHandshake(stream, terms, check_wait).accept()

    def _write(self, frames: "_AuthenticatedFrames") -> None:
        try:
            while (body := self._unsent.get()) is not _CLOSE:
                frames.send(body, self._service.stall_check())
                with self._lock:
                    self._num_unsent_bytes -= len(body)
        except LinkBroken as exc:
            log.debug("%s: cannot send: %s", self.name, exc)
        finally:
            frames.stream.shut()


class _AuthenticatedFrames:
    """Frames that only the two ends of this connection can make, in the order they were sent."""

    def __init__(self, stream: Stream, key: bytes, *, is_client: bool) -> None:
        self.stream = stream
        self._key = key
        self._directions = (b"c", b"s") if is_client else (b"s", b"c")
        self._num_sent = self._num_received = 0

    def send(self, body: bytes, check_wait: WaitCheck) -> None:
        """One frame."""
        mac = self._mac(self._directions[0], self._num_sent, body)
        self._num_sent += 1
        self.stream.send([_HEAD.pack(len(body), mac), body], check_wait)

    def receive(self, check_wait: WaitCheck, max_bytes: int) -> bytes:
        """The body of the next frame, of which the first byte is there; else Malformed."""
        head = bytearray(_HEAD.size)
        self.stream.fill(memoryview(head), check_wait)
        num_bytes, mac = _HEAD.unpack(head)
        if num_bytes > max_bytes:
            raise Malformed(f"a message of {num_bytes} bytes")
        body = bytearray(num_bytes)
        self.stream.fill(memoryview(body), check_wait)
        own = self._mac(self._directions[1], self._num_received, body)
        if not hmac.compare_digest(mac, own):
            raise Malformed("a message whose seal is not ours")
        self._num_received += 1
        return bytes(body)

    def _mac(self, way: bytes, number: int, body: bytes | bytearray) -> bytes:
        said = way + struct.pack("<Q", number)
        digest = hashlib.blake2b(said, key=self._key[:64], digest_size=16)
        digest.update(body)
        return digest.digest()


_REASONS = {
    PushFailure.UNREACHABLE: Reason.UNREACHABLE,
    PushFailure.REFUSED: Reason.DENIED,
}
