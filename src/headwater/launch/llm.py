"""`headwater.LLM`: a model in this process, without a server."""

from typing import Any

from headwater.clock import SystemClock
from headwater.config import EngineConfig
from headwater.engine.llm import OfflineEngine
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import ConfigError
from headwater.launch.core import build_core


class LLM(OfflineEngine):
    """A model in this process: `LLM("path/to/model").generate(["Hello"])`.

    Settings are those of `EngineConfig`. Raises ModelError or ConfigError, with a sentence,
    for a model that cannot be served.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:  # noqa: ANN401 -- typed by EngineConfig
        config = EngineConfig(model=model, **settings)
        if config.kv_events is not None:
            raise ConfigError("kv_events: a model without a server has no followers")
        core, info = build_core(config)
        super().__init__(
            core, Tokenizer(info.model_dir), SystemClock(), vocab_size=info.vocab_size
        )
        self.info = info
