"""Storage backends by name, imported on first use.

A plug-in is "module:Class". The class has a method `open(settings, opening)`, which takes a
mapping of settings and an `Opening` and returns a `StorageBackend`.
"""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from headwater.errors import ConfigError, HeadwaterError
from headwater.storage.base import Opening, StorageBackend
from headwater.storage.late import LateStorage

_BACKENDS = {
    "file": "headwater.storage.file.backend:FileStorage",
    "memory": "headwater.storage.memory:MemoryStorage",
    "mooncake": "headwater.storage.mooncake.backend:MooncakeStorage",
    "redis": "headwater.storage.redis.backend:RedisStorage",
}

OPEN_TIMEOUT_S = 15.0
"""Longest wait for a backend to open. If it takes longer, the engine starts without it."""


def open_storage(
    name: str, settings: Mapping[str, Any], opening: Opening, *, is_optional: bool = False
) -> StorageBackend:
    """Open the backend `name`. Raises ConfigError that says what to change.

    A backend that does not open within OPEN_TIMEOUT_S, or whose server does not answer, opens
    in the background; until then every call raises StorageUnavailable. If `is_optional`, a
    backend that cannot be opened now for another reason opens in the background too.
    """
    path = _BACKENDS.get(name, name)
    if ":" not in path:
        raise ConfigError(f"unknown storage backend {name!r}; {_suggest(name)}")
    module_name, _, class_name = path.partition(":")
    try:
        backend = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"storage backend {name!r} cannot be imported: {error}") from error
    except AttributeError as error:
        raise ConfigError(
            f"storage backend {name!r} cannot be imported: {module_name!r} has no {class_name!r}"
        ) from error
    late = LateStorage(
        name,
        lambda: backend.open(settings, opening),
        block_bytes=opening.format.block_bytes,
        is_optional=is_optional,
    )
    try:
        return late.wait(OPEN_TIMEOUT_S)
    except HeadwaterError:
        raise
    except Exception as error:
        raise ConfigError(
            f"storage backend {name!r} cannot be opened: {type(error).__name__}: {error}"
        ) from error


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(name, _BACKENDS, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(_BACKENDS)}, or your own as 'module:Class'"
