"""Decides whether a request may reach the application, before its body is read.

The order is: `Host` and `Origin`, then the signature of the cluster, then the API key and its
scope. Everything here looks at headers only.
"""

import base64
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
from starlette.types import Scope as AsgiScope

from headwater.clock import Clock
from headwater.config import is_loopback
from headwater.server import dashboard
from headwater.server.cluster_auth import ClusterAuth
from headwater.server.errors import RequestRefused
from headwater.server.key_limits import KeyLimiter, KeyLimits
from headwater.server.keys import ANYONE, PEER, SINGLE_KEY, ApiKey, Caller, KeyRing, Scope
from headwater.server.router.protocol import CALLER_HEADER

_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_ADMIN_PATHS = (
    "/v1/pause",
    "/v1/resume",
    "/v1/reload_weights",
    "/reset_prefix_cache",
    "/flush_cache",
    "/server_info",
    "/cache",
    "/cache/tree",
    "/instances",
)
_JSON_PATHS = (*_ADMIN_PATHS, "/v1/abort_requests", "/cache/sessions/", "/instances/")
"""Control paths: a body must be application/json, which browsers do not send to another origin
without a preflight request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """An accepted request."""

    caller: Caller
    key: ApiKey | None = None
    """The key whose limits apply; None for the cluster's own requests."""

    is_cluster: bool = False
    """Whether the router or an instance of this cluster sent the request."""


class HostPolicy:
    """Accepts or refuses `Host` headers. This prevents DNS rebinding: a web page whose name
    resolves to this server's address."""

    def __init__(self, bound: str, allowed: Iterable[str], *, any_name: bool) -> None:
        """`any_name` accepts every name; used when the server requires keys and is reachable
        from other hosts, whose clients often use the name of a proxy or of a service."""
        self._allowed = {name.lower() for name in allowed} | {bound.lower()} | _LOOPBACK_NAMES
        self._any_name = any_name or "*" in self._allowed
        self._is_wildcard = bound in ("0.0.0.0", "::")

    def accepts(self, host: str) -> bool:
        """Whether a `Host` header names this server."""
        if self._any_name:
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
            if name in self._allowed:
                return True
            address = ipaddress.ip_address(name)
        except ValueError:
            return False  # no address, or a malformed one such as `[::1`
        # An address cannot be rebound, so a wildcard listener accepts each of its addresses.
        return address.is_loopback or self._is_wildcard


class AccessPolicy:
    """The access rules of one server."""

    def __init__(
        self,
        keys: KeyRing,
        hosts: HostPolicy,
        cluster: ClusterAuth,
        limits: KeyLimiter,
        *,
        is_insecure: bool = False,
    ) -> None:
        """With `is_insecure` (`--insecure`), instances register at a router without a peer
        token."""
        self.keys = keys
        self.limits = limits
        self._hosts = hosts
        self.cluster = cluster
        self._has_token = cluster.has_token
        self._is_open = keys.is_open
        self._is_insecure = is_insecure

    def check(self, scope: AsgiScope) -> Access:
        """The caller of this request. Raises RequestRefused when it is not allowed."""
        headers = _Headers(scope)
        path, method = scope["path"], scope["method"]
        if path == "/health":
            return Access(caller=ANYONE)
        self._check_host(headers)
        if method not in _SAFE_METHODS:
            self._check_origin(headers)
            _check_content_type(path, headers)
        if self._has_token and self.cluster.verify(scope):
            return Access(caller=_forwarded_caller(headers), is_cluster=True)
        if _is_dashboard(path):
            return Access(caller=Caller())
        if path.startswith("/instances") and method not in _SAFE_METHODS:
            return self._check_registration()
        return self._check_key(path, headers)

    def _check_key(self, path: str, headers: "_Headers") -> Access:
        if self._is_open:
            return Access(caller=ANYONE)
        key = self.keys.find(headers.bearer())
        if key is None:
            raise RequestRefused(
                "a valid API key is needed; send it as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )
        needed = _needed_scope(path)
        if needed not in key.scopes and "admin" not in key.scopes:
            raise RequestRefused(
                f"the key {key.name!r} has no {needed!r} scope, which {path[:100]} needs; use another key",
                status=403,
                code="insufficient_scope",
            )
        return Access(caller=_caller_of(key), key=key)

    def _check_registration(self) -> Access:
        """Refuse a registration without the peer token, unless `is_insecure`. An API key is not
        sufficient."""
        if not self._is_insecure:
            raise RequestRefused(
                "the peer token is missing or wrong; start instance and router with the same "
                "--peer-token-file",
                status=403,
                code="peer_token",
            )
        return Access(caller=PEER, is_cluster=True)

    def _check_host(self, headers: "_Headers") -> None:
        host = headers.get(b"host")
        # Browsers always send Host; a client without it cannot be a rebound page.
        if host and not self._hosts.accepts(host):
            raise RequestRefused(
                f"the Host header {host[:100]!r} does not name this server; start it with "
                "--allowed-hosts NAME to accept it",
                status=421,
                code="host_not_allowed",
            )

    def _check_origin(self, headers: "_Headers") -> None:
        """Refuse requests of foreign web pages. A browser sends `Origin` with every
        cross-origin POST; other clients send none."""
        origin, host = headers.get(b"origin"), headers.get(b"host")
        if origin and _authority(origin) != host.lower():
            raise RequestRefused(
                f"requests from web pages of {origin[:100]!r} are not accepted; call this server from a "
                "program, or through a proxy under the same origin",
                status=403,
                code="cross_origin",
            )


class AccessSettings(Protocol):
    """The settings of a server or a router that decide about access."""

    @property
    def host(self) -> str: ...
    @property
    def allowed_hosts(self) -> tuple[str, ...]: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def api_keys_file(self) -> str | None: ...
    @property
    def peer_token(self) -> str | None: ...


def make_access_policy(
    settings: AccessSettings,
    clock: Clock,
    unix_s: Callable[[], float],
    *,
    is_insecure: bool = False,
    limits: KeyLimiter | None = None,
) -> AccessPolicy:
    """The access rules of `settings`. `limits` counts the requests of keys; without it they are
    counted in this process. Raises ConfigError for a bad keys file."""
    keys = KeyRing(settings.api_key, settings.api_keys_file, clock)
    allowed = settings.allowed_hosts
    any_name = not keys.is_open and not is_loopback(settings.host) and not allowed
    return AccessPolicy(
        keys,
        HostPolicy(settings.host, allowed, any_name=any_name),
        ClusterAuth(settings.peer_token, unix_s),
        limits or KeyLimits(clock),
        is_insecure=is_insecure,
    )


def _caller_of(key: ApiKey) -> Caller:
    """The caller that presents this key."""
    # The single key of --api-key is one tenant, like a server without keys.
    return Caller(
        name="" if key.name == SINGLE_KEY else key.name,
        scopes=key.scopes,
        cache_salt=key.cache_salt or "",
        share=key.share,
    )


def encode_caller(caller: Caller) -> str:
    """A caller as the router sends it to instances, in a signed header."""
    return base64.b64encode(msgspec.json.encode(caller)).decode()


def _forwarded_caller(headers: "_Headers") -> Caller:
    value = headers.get(CALLER_HEADER.encode())
    if not value:
        return PEER
    try:
        return msgspec.json.decode(base64.b64decode(value, validate=True), type=Caller)
    except (ValueError, msgspec.DecodeError) as exc:
        raise RequestRefused(
            f"{CALLER_HEADER} is not base64 of a caller; only a router may send it",
            code="bad_caller",
        ) from exc


def _needed_scope(path: str) -> Scope:
    if path == "/metrics":
        return "metrics"
    return "admin" if path in _ADMIN_PATHS else "client"


def _check_content_type(path: str, headers: "_Headers") -> None:
    if not path.startswith(_JSON_PATHS):
        return
    kind = headers.get(b"content-type").partition(";")[0].strip().lower()
    has_body = headers.get(b"content-length") not in ("", "0") or bool(
        headers.get(b"transfer-encoding")
    )
    if has_body and kind != "application/json":
        raise RequestRefused(
            f"the body has the content type {kind[:100]!r}; send it as application/json",
            status=415,
            code="content_type",
        )


def _authority(origin: str) -> str | None:
    """Host and port of an origin; None for a malformed one."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _is_dashboard(path: str) -> bool:
    """The dashboard's files hold no secrets; its script sends the key that the user types in."""
    return path == dashboard.PATH or path.startswith(dashboard.PATH + "/")


class _Headers:
    """The headers of one request; the first of each name."""

    def __init__(self, scope: AsgiScope) -> None:
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]

    def get(self, name: bytes) -> str:
        """The value of the header `name`, or an empty string."""
        found = next((value for other, value in self._headers if other == name), b"")
        return found.decode("latin-1")

    def bearer(self) -> bytes:
        """The value of `Authorization: Bearer`, or of `x-api-key`."""
        scheme, _, key = self.get(b"authorization").partition(" ")
        if scheme.lower() == "bearer":
            return key.strip().encode("latin-1")
        return self.get(b"x-api-key").encode("latin-1")
