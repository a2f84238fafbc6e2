"""Storage backends by name, imported on first use.

A plug-in is "module:Class". The class has a method `open(settings, opening)`, which takes a
mapping of settings and an `Opening` and returns a `StorageBackend`.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from headwater.errors import ConfigError, HeadwaterError, StorageTimeout
from headwater.storage.base import Opening, StorageBackend
from headwater.storage.io_threads import IoThreads

_BACKENDS = {
    "file": "headwater.storage.file.backend:FileStorage",
    "memory": "headwater.storage.memory:MemoryStorage",
    "mooncake": "headwater.storage.mooncake.backend:MooncakeStorage",
    "redis": "headwater.storage.redis.backend:RedisStorage",
}


OPEN_TIMEOUT_S = 60.0
"""Longest wait for a backend to open."""


def open_storage(name: str, settings: Mapping[str, Any], opening: Opening) -> StorageBackend:
    """Open the backend `name`. Raises ConfigError with what to change."""
    path = _BACKENDS.get(name, name)
    if ":" not in path:
        raise ConfigError(f"unknown storage backend {name!r}; {_suggest(name)}")
    module_name, _, class_name = path.partition(":")
    try:
        backend = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"storage backend {name!r} cannot be imported: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"module {module_name!r} has no {class_name!r}") from error
    return _open_in_time(name, lambda: backend.open(settings, opening))


def _open_in_time(name: str, open_backend: Callable[[], StorageBackend]) -> StorageBackend:
    """Open in a thread that can be abandoned, because a mount or a server may never answer."""
    try:
        [backend] = IoThreads(f"storage backend {name!r}", 1).run(
            [open_backend], timeout_s=OPEN_TIMEOUT_S
        )
    except StorageTimeout as error:
        raise ConfigError(
            f"storage backend {name!r} did not open within {OPEN_TIMEOUT_S:g} s; check that "
            "its directory or server answers"
        ) from error
    except HeadwaterError:
        raise
    except Exception as error:
        raise ConfigError(
            f"storage backend {name!r} cannot be opened: {type(error).__name__}: {error}"
        ) from error
    return backend


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(name, _BACKENDS, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(_BACKENDS)}, or your own as 'module:Class'"
