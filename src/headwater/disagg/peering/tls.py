"""Mutual TLS between instances: both ends show a certificate that the cluster's CA signed.

Names in certificates are not compared with addresses: membership in the cluster is what counts,
and addresses of instances change. The CA must therefore sign certificates of this cluster only.
The shared token is still proved inside the encrypted connection.
"""

import contextlib
import ssl
from collections.abc import Sequence
from threading import Lock

from headwater.disagg.peering.stream import Stream, WaitCheck
from headwater.disagg.protocol.errors import LinkBroken
from headwater.disagg.protocol.push import PushFailure
from headwater.errors import ConfigError

_CHUNK_BYTES = 256 << 10
"""Bytes encrypted or received at once: 16 TLS records, so that the cost of Python calls is
small."""


class Tls:
    """Certificates of this instance, for both ends of a connection."""

    def __init__(self, certfile: str, keyfile: str, ca_certs: str) -> None:
        """Paths of PEM files. Raises ConfigError if one of them cannot be used."""
        files = (certfile, keyfile, ca_certs)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, *files)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, *files)

    def accept(self, stream: Stream, check_wait: WaitCheck) -> Stream:
        """The encrypted stream over an accepted connection. LinkBroken if the peer has no
        certificate of the cluster."""
        return _handshake(TlsStream(stream, self._server, is_server=True), check_wait)

    def connect(self, stream: Stream, check_wait: WaitCheck) -> Stream:
        """The encrypted stream over a connection that was made."""
        return _handshake(TlsStream(stream, self._client, is_server=False), check_wait)


def open_tls(certfile: str | None, keyfile: str | None, ca_certs: str | None) -> Tls | None:
    """TLS with these files; None if none of them is given."""
    if certfile is None and keyfile is None and ca_certs is None:
        return None
    if certfile is None or keyfile is None or ca_certs is None:
        raise ConfigError(
            "TLS between instances needs --ssl-certfile, --ssl-keyfile and --ssl-ca-certs: "
            "each instance shows a certificate and checks that of its peer"
        )
    return Tls(certfile, keyfile, ca_certs)


class TlsStream(Stream):
    """A `Stream` with encrypted bytes on the same socket.

    OpenSSL must not be used by two threads at once, and one thread receives while another one
    sends. So OpenSSL works on memory under a lock, and each thread moves encrypted bytes between
    that memory and the socket without the lock: a thread that waits for the peer does not hold
    up the other one.
    """

    def __init__(self, stream: Stream, context: ssl.SSLContext, *, is_server: bool) -> None:
        # The socket has its options already; they are set once, by `stream`.
        self.socket = stream.socket
        self.num_received = 0
        self._lock = Lock()
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._raw = memoryview(bytearray(_CHUNK_BYTES))

    def handshake(self, check_wait: WaitCheck) -> None:
        """Agree on keys and check certificates. LinkBroken if that fails."""
        is_done = False
        while not is_done:
            try:
                with self._lock:
                    self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                with contextlib.suppress(LinkBroken):
                    self._flush(check_wait)  # the alert that tells the peer why
                raise _refused(error) from error
            self._flush(check_wait)
            if not is_done and not self._pull():
                check_wait()

    def send(self, parts: Sequence[memoryview | bytes], check_wait: WaitCheck) -> None:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                try:
                    with self._lock:
                        sent = self._tls.write(view[:_CHUNK_BYTES])
                except ssl.SSLError as error:
                    raise _refused(error) from error
                view = view[sent:]
                self._flush(check_wait)

    def receive_some(self, views: Sequence[memoryview], flags: int = 0) -> int:
        total = 0
        for view in views:
            left = view
            while left:
                got = self._decrypt(left)
                if got == 0 and (total or not self._pull()):
                    self.num_received += total
                    return total
                left = left[got:]
                total += got
        self.num_received += total
        return total

    def await_readable(self) -> None:
        with self._lock:
            has_bytes = self._incoming.pending or self._tls.pending()
        if not has_bytes:
            super().await_readable()

    def _decrypt(self, view: memoryview) -> int:
        """Fill `view` from bytes that were received; 0 until a complete record has arrived."""
        try:
            with self._lock:
                return self._tls.read(len(view), view)  # type: ignore[return-value]
        except ssl.SSLWantReadError:
            return 0
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError) as error:
            raise LinkBroken("the peer closed the connection") from error
        except ssl.SSLError as error:
            raise _refused(error) from error

    def _pull(self) -> bool:
        """Receive encrypted bytes; False if none came within a tick."""
        got = super().receive_some([self._raw], 0)
        self.num_received -= got  # only decrypted bytes count
        with self._lock:
            self._incoming.write(self._raw[:got])
        return got > 0

    def _flush(self, check_wait: WaitCheck) -> None:
        """Send the encrypted bytes that are ready. Only the sending thread calls this, so they
        stay in order. Bytes that OpenSSL produces while it receives are sent with the next
        `send`."""
        with self._lock:
            ready = self._outgoing.read()
        if ready:
            super().send([ready], check_wait)


def _handshake(stream: TlsStream, check_wait: WaitCheck) -> TlsStream:
    stream.handshake(check_wait)
    return stream


def _refused(error: ssl.SSLError) -> LinkBroken:
    reason = error.reason or str(error)
    return LinkBroken(f"TLS with the peer failed: {reason}", PushFailure.REFUSED)


def _context(protocol: int, certfile: str, keyfile: str, ca_certs: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certfile, keyfile)
        context.load_verify_locations(ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot use --ssl-certfile {certfile}, --ssl-keyfile {keyfile} and "
            f"--ssl-ca-certs {ca_certs}: {error}"
        ) from error
    return context
