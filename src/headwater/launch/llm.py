"""`headwater.LLM`: a model in this process, without a server."""

import os
from dataclasses import is_dataclass, replace
from typing import Any, get_type_hints

import msgspec

from headwater.clock import SystemClock
from headwater.config import EngineConfig
from headwater.engine.llm import OfflineEngine
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import ConfigError, PackageMissing
from headwater.launch.core import build_core
from headwater.launch.hub import find_model
from headwater.words import suggest


class LLM(OfflineEngine):
    """A model in this process: `LLM("path/to/model").generate(["Hello"])`.

    `model` is a folder or a Hugging Face name. A name is downloaded once: at `revision` if
    given, otherwise the cached version, otherwise the newest one. Settings are those of
    `EngineConfig`. Raises ModelError for a model that cannot be served and ConfigError for an
    invalid setting.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        **settings: Any,  # noqa: ANN401 -- typed by EngineConfig
    ) -> None:
        config = _config({**settings, "model": _folder(model)})
        found = find_model(config.model, revision)
        config = replace(config, model=found.folder, model_name=found.name)
        if config.kv_events is not None:
            raise ConfigError(
                "kv_events: a model without a server has no subscribers; leave it out"
            )
        try:
            core, info = build_core(config)
        except ModuleNotFoundError as error:
            raise PackageMissing(error, feature="headwater.LLM", extra="engine") from error
        super().__init__(
            core,
            Tokenizer(info.model_dir),
            SystemClock(),
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
        )
        self.info = info


def _folder(model: str | os.PathLike[str] | None) -> str | None:
    """The name of the folder, given as text or as a path."""
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def _config(settings: dict[str, Any]) -> EngineConfig:
    """The settings, after a check of their names and types."""
    types = get_type_hints(EngineConfig)
    for name, value in settings.items():
        if name not in types:
            raise ConfigError(f"LLM has no setting {name!r}{suggest(name, types)}")
        try:
            msgspec.convert(value, types[name], from_attributes=is_dataclass(value))
        except msgspec.ValidationError as exc:
            raise ConfigError(f"the setting {name!r} of LLM is wrong: {exc}") from exc
    return EngineConfig(**settings)
