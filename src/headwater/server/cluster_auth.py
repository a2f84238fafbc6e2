"""Proof that a request comes from the router or an instance of the same cluster.

A sender signs its request with the peer token. The token itself does not travel, so a plain
HTTP connection does not disclose it. A receiver also accepts the token in a header, but only from
loopback or over TLS.

    x-headwater-signature: v1 UNIX_S NONCE HMAC-SHA256(token, method, path, signed headers)
"""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping

from starlette.types import Scope

from headwater.config import is_loopback
from headwater.server.router.protocol import DIGEST_HEADER, SIGNED_HEADERS, TOKEN_HEADER

SIGNATURE_HEADER = "x-headwater-signature"

_MAX_AGE_S = 120.0
"""Longest age of a signature. It allows for clocks that differ by less."""

_MAX_NONCES = 250_000
"""Enough for 1,000 requests per second over twice `_MAX_AGE_S`."""

_CONTEXT = b"headwater request v1"

_ONCE = frozenset({SIGNATURE_HEADER, TOKEN_HEADER, *SIGNED_HEADERS})
"""Headers that a request of the cluster has at most once."""


class ClusterAuth:
    """Signs and verifies requests with one peer token. Without a token no request is
    accepted."""

    def __init__(self, token: str | None, unix_s: Callable[[], float]) -> None:
        """`unix_s` is the current Unix time."""
        self._token = None if token is None else token.encode()
        self._unix_s = unix_s
        self._nonces: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Time of arrival and time stamp of each nonce: a signature is accepted once."""
        self._forgotten_stamp = -1
        """Latest stamp of a nonce that was dropped early. Older signatures are not accepted,
        because they may have been used."""

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def sign(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> dict[str, str]:
        """`headers` and the signature of the request; unchanged without a token.

        With `body`, its digest is added and signed; the receiver calls `check_digest`.
        """
        if self._token is None:
            return dict(headers)
        if body is not None:
            headers = {**headers, DIGEST_HEADER: hashlib.sha256(body).hexdigest()}
        stamp, nonce = str(int(self._unix_s())), secrets.token_hex(12)
        mac = self._mac(method, path, stamp, nonce, headers)
        return {**headers, SIGNATURE_HEADER: f"v1 {stamp} {nonce} {mac}"}

    def verify(self, scope: Scope) -> bool:
        """Whether the request was signed with the token, or has the token in a header and came
        over loopback or TLS."""
        if self._token is None:
            return False
        fields = [(name.decode("latin-1"), value) for name, value in scope["headers"]]
        own = [name for name, _ in fields if name in _ONCE]
        if len(own) > len(set(own)):
            return False  # of two equal names, one could be checked and the other one used
        headers = {name: value.decode("latin-1") for name, value in fields}
        given = headers.get(TOKEN_HEADER)
        if given is not None and _is_confidential(scope):
            return hmac.compare_digest(given.encode("latin-1"), self._token)
        return self._is_signed(scope, headers)

    def _is_signed(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        parts = headers.get(SIGNATURE_HEADER, "").split(" ")
        if len(parts) != 4 or parts[0] != "v1":
            return False
        _, stamp, nonce, given = parts
        now = self._unix_s()
        is_number = stamp.isascii() and stamp.isdigit() and len(stamp) <= 12
        if not is_number or abs(now - int(stamp)) > _MAX_AGE_S:
            return False
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        mac = self._mac(scope["method"], path, stamp, nonce, headers)
        if not hmac.compare_digest(given.encode(), mac.encode()):
            return False
        return self._is_new(nonce, int(stamp), now)

    def _is_new(self, nonce: str, stamp: int, now: float) -> bool:
        """Record a nonce; False when it was used before, or may have been."""
        if nonce in self._nonces or stamp <= self._forgotten_stamp:
            return False
        self._nonces[nonce] = now, stamp
        while self._nonces:
            seen_s, oldest = next(iter(self._nonces.values()))
            if now - seen_s <= 2 * _MAX_AGE_S:
                if len(self._nonces) <= _MAX_NONCES:
                    break
                self._forgotten_stamp = max(self._forgotten_stamp, oldest)
            self._nonces.popitem(last=False)
        return True

    def _mac(
        self,
        method: str,
        path: str,
        stamp: str,
        nonce: str,
        headers: Mapping[str, str],
    ) -> str:
        assert self._token is not None, "callers check for a token"
        fields = [method, path, stamp, nonce]
        fields += [headers.get(name, "") for name in SIGNED_HEADERS]
        # Lengths keep the fields apart: no two requests have the same message.
        message = b"".join(
            len(raw).to_bytes(8, "big") + raw
            for raw in (_CONTEXT, *(field.encode("latin-1", "replace") for field in fields))
        )
        return hmac.new(self._token, message, hashlib.sha256).hexdigest()


def check_digest(given: str | None, body: bytes) -> bool:
    """Whether a signed digest fits the body. A request without a digest had the token itself in
    a header."""
    if given is None:
        return True
    return hmac.compare_digest(given.encode(), hashlib.sha256(body).hexdigest().encode())


def _is_confidential(scope: Scope) -> bool:
    """Whether other hosts cannot read this connection."""
    client = scope.get("client")
    return scope.get("scheme") == "https" or (client is not None and is_loopback(client[0]))
