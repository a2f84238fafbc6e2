"""Authentication and encryption of KV event sockets with ZMQ CURVE.

Both key pairs are made from the cluster's peer token, so a process with the token needs no other
key, and a process without it can neither subscribe nor request a replay.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.utils.z85
from zmq.auth.thread import ThreadAuthenticator

_DOMAIN = "headwater"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """The key pairs of one cluster, Z85-encoded."""

    server_secret: bytes
    server_public: bytes
    client_secret: bytes
    client_public: bytes

    @classmethod
    def of_token(cls, token: str) -> "CurveKeys":
        """The keys for a peer token."""
        server, client = (_secret(token, role) for role in ("server", "client"))
        return cls(
            server_secret=server,
            server_public=zmq.curve_public(server),
            client_secret=client,
            client_public=zmq.curve_public(client),
        )

    def serve(self, socket: "zmq.Socket[Any]") -> None:
        """Make a socket accept clients with the client key only. Call before `bind`; the
        context needs an `authenticator`."""
        socket.curve_server = True
        socket.curve_secretkey = self.server_secret
        socket.zap_domain = _DOMAIN.encode()

    def connect(self, socket: "zmq.Socket[Any]") -> None:
        """Make a socket prove that it has the token, and verify the server. Call before
        the socket's own `connect`."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret

    def authenticator(self, context: "zmq.Context[zmq.Socket[bytes]]") -> ThreadAuthenticator:
        """The thread that checks client keys of `context`; `stop` it before the context ends."""
        thread = ThreadAuthenticator(context)
        thread.start()
        thread.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)
        return thread

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's key belongs to the cluster. The authenticator calls it for each
        connection."""
        return hmac.compare_digest(key, self.client_public)


def _secret(token: str, role: str) -> bytes:
    """A Curve25519 secret key, Z85-encoded."""
    raw = hmac.new(
        token.encode(), f"headwater kv events {role} 1".encode(), hashlib.sha256
    ).digest()
    encoded: bytes = zmq.utils.z85.encode(raw)
    return encoded
