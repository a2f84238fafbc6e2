"""Loads other weights while the engine lives, and updates the parts that depend on them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cache import TieredCache
from headwater.clock import Clock
from headwater.config import EngineConfig
from headwater.engine.client import EngineInfo
from headwater.launch.tiers import open_backend
from headwater.transfer.mover import Mover
from headwater.transfer.workers import StorageWorkers

if TYPE_CHECKING:
    from headwater.device.model import LoadedModel
    from headwater.device.runner import TorchRunner


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts of an engine that depend on its weights."""

    model: "LoadedModel"
    runner: "TorchRunner"
    cache: TieredCache
    mover: Mover


class Reloader:
    """Gives the parts of one engine other weights.

    Called between two steps, with nothing running and no copy in flight. Everything that can
    fail is done before anything is changed.
    """

    def __init__(
        self, config: EngineConfig, parts: Parts, info: EngineInfo, clock: Clock
    ) -> None:
        self._config = config
        self._parts = parts
        self._info = info
        self._clock = clock

    def reload(self, folder: str | None) -> EngineInfo:
        """Serve the weights in `folder`, or those in the same folder again; return the new
        description.

        With the same content nothing changes, and cached blocks stay. After a ModelError or
        ConfigError the engine continues with the old weights.
        """
        from headwater.device.reload import load_like

        parts = self._parts
        model = load_like(parts.model, Path(folder) if folder else parts.model.model_dir)
        if model.fingerprint == parts.model.fingerprint:
            return self._info
        scheme = replace(parts.cache.scheme, fingerprint=model.fingerprint)
        workers = parts.mover.workers
        if isinstance(workers, StorageWorkers):
            workers.replace(open_backend(self._config, scheme, workers.slab, self._clock))
        parts.cache.rekey(scheme)
        parts.runner.use(model)
        parts.model = model
        self._info = replace(
            self._info, fingerprint=model.fingerprint.hex(), model_dir=str(model.model_dir)
        )
        return self._info
