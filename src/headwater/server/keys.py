"""API keys: their scopes, limits and default cache salt, from a flag or from a file.

    {"keys": [{"key": "…", "name": "search", "scopes": ["client"], "requests_per_minute": 600,
               "max_concurrency": 32, "share": 2, "cache_salt": "…"}]}

`key_sha256` (hex) can be given instead of `key`. The file is read again when it changes and on
SIGHUP. If it cannot be read then, the previous keys stay valid.
"""

import hashlib
import hmac
import logging
import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from headwater.clock import Clock
from headwater.errors import ConfigError

log = logging.getLogger(__name__)

Scope = Literal["client", "admin", "metrics"]

_ALL_SCOPES: tuple[Scope, ...] = ("client", "admin", "metrics")

_CHECK_EVERY_S = 1.0
_MAX_FILE_BYTES = 1 << 20

SINGLE_KEY = "default"
"""Name of the key given with `--api-key`."""

KeyName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class ApiKey(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One key of the file."""

    name: KeyName
    key: Annotated[str, Meta(min_length=16, max_length=512)] | None = None
    key_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")] | None = None
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)] = ("client",)
    requests_per_minute: Annotated[float, Meta(gt=0)] | None = None
    """Average rate; a burst of one minute's requests is allowed. None means no limit."""

    max_concurrency: Annotated[int, Meta(ge=1)] | None = None
    """Maximum number of requests in flight; None means no limit."""

    share: Annotated[float, Meta(gt=0)] = 1.0
    """Weight of this key when keys compete for the engine."""

    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Salt of requests without a `cache_salt`, so that keys do not share cached prefixes."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        if self.key is not None:
            return hashlib.sha256(self.key.encode()).digest()
        return bytes.fromhex(self.key_sha256 or "")


class _KeyFile(Struct, kw_only=True, forbid_unknown_fields=True):
    keys: Annotated[list[ApiKey], Meta(min_length=1)]


class Caller(Struct, kw_only=True, frozen=True):
    """The sender of a request; set by the access check, or by the router for its clients."""

    name: str = ""
    """Name of the key; empty without keys."""

    scopes: tuple[Scope, ...] = ()
    cache_salt: str = ""
    share: float = 1.0

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes


ANYONE = Caller(scopes=_ALL_SCOPES)
"""The caller on a server without keys."""

PEER = Caller(scopes=_ALL_SCOPES)
"""The caller when the router sends a request of its own, not one of a client."""


class KeyRing:
    """The keys of one server. Used on its event loop only."""

    def __init__(self, api_key: str | None, path: str | None, clock: Clock) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._single: list[ApiKey] = []
        if api_key is not None:
            self._single.append(
                ApiKey(name=SINGLE_KEY, key_sha256=_sha(api_key), scopes=_ALL_SCOPES)
            )
        self._path = None if path is None else Path(path)
        self._clock = clock
        self._stamp: tuple[int, int] | None = None
        self._checked_s = clock.now()
        self._keys: list[ApiKey] = list(self._single)
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._keys = [*self._single, *_read(self._path)]

    @property
    def is_open(self) -> bool:
        """Whether the server requires no key."""
        return not self._single and self._path is None

    def find(self, given: bytes) -> ApiKey | None:
        """The key with this value. Takes the same time for every wrong value."""
        self._reload_if_changed()
        digest, found = hashlib.sha256(given).digest(), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def reload(self) -> None:
        """Read the file again. A file that cannot be used is logged and changes nothing."""
        if self._path is None:
            return
        try:
            self._stamp = _stamp(self._path)
            keys = _read(self._path)
        except ConfigError as exc:
            log.error("API keys not reloaded; the previous keys stay valid: error=%s", exc)
            return
        self._keys = [*self._single, *keys]
        log.warning("API keys reloaded: file=%s keys=%d", self._path, len(keys))

    def _reload_if_changed(self) -> None:
        now = self._clock.now()
        if self._path is None or now - self._checked_s < _CHECK_EVERY_S:
            return
        self._checked_s = now
        try:
            changed = _stamp(self._path) != self._stamp
        except ConfigError:
            return  # the file is being replaced; the next check reads it
        if changed:
            self.reload()


def _read(path: Path) -> list[ApiKey]:
    try:
        raw = path.read_bytes()[: _MAX_FILE_BYTES + 1]
        keys = msgspec.json.decode(raw, type=_KeyFile).keys
    except OSError as exc:
        raise ConfigError(f"--api-keys-file {path}: {exc.strerror or exc}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"--api-keys-file {path}: {exc}") from exc
    names = [key.name for key in keys]
    for key in keys:
        if (key.key is None) == (key.key_sha256 is None):
            raise ConfigError(
                f"--api-keys-file {path}: the entry {key.name!r} needs either key or key_sha256, not both"
            )
        if names.count(key.name) > 1:
            raise ConfigError(
                f"--api-keys-file {path}: the name {key.name!r} is used twice; rename one"
            )
    return keys


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as exc:
        raise ConfigError(f"--api-keys-file {path}: {exc.strerror or exc}") from exc
    if status.st_mode & 0o022:
        raise ConfigError(
            f"--api-keys-file {path} can be changed by other users; run: chmod go-w {path}"
        )
    return status.st_mtime_ns, status.st_ino


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
