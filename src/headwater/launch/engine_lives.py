"""Runs one engine process after another, as long as the budget of restarts lasts."""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace

import msgspec

from headwater.clock import Clock
from headwater.config import EngineConfig
from headwater.engine.client import EngineInfo
from headwater.engine.engine_process import EngineProcess
from headwater.engine.record_file import RecordFile
from headwater.engine.rundir import RunDir
from headwater.engine.wire import EngineStart
from headwater.errors import EngineDead, HeadwaterError
from headwater.launch.restarts import WINDOW_S, RestartBudget
from headwater.launch.signals import unix_s
from headwater.launch.worker_start import EngineDown, EngineUp
from headwater.launch.worker_state import WorkersState
from headwater.server.config import ServerConfig

log = logging.getLogger(__name__)

_PAUSES_S = (0.0, 1.0, 2.0, 5.0)
"""Pause before the first, second … restart in the window: a device may need time to recover."""

_SILENT_S = 60.0
"""A process that does not answer for this time is killed: it is stopped or hangs. A long step
cannot be the reason, because a separate thread answers."""

_MAX_RETRY_AFTER_S = 60.0


class EngineLives:
    """Owns the engine process of a server. Used on one event loop."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        state: WorkersState,
        clock: Clock,
        recording: RecordFile | None,
    ) -> None:
        self.engine_config = engine_config
        self._config = config
        self._state = state
        self._clock = clock
        self._recording = recording
        self._rundir = RunDir()
        # A memfd has no name, so nothing is left when its last user has ended.
        self._host_memory = (
            os.memfd_create("headwater-blocks"),
            os.memfd_create("headwater-slots"),
        )
        self._engine: EngineProcess | None = None
        self._num_lives = 0
        self._num_violations = 0
        self._load_s = 0.0
        self._num_device_blocks = 0
        self._began: tuple[float, float] | None = None
        """When the first engine was ready: Unix time, and time of the clock."""
        self.up: EngineUp | None = None
        """The engine that accepts requests; None while there is none."""
        self.is_stopping = False
        """True when the server ends: then an engine that ends is not replaced."""

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self._engine is not None, "called after the first start"
        return self._engine.pid

    async def run(
        self, on_up: Callable[[EngineUp], None], on_down: Callable[[EngineDown], None]
    ) -> None:
        """Run one engine after another. Raises the error of the first start, or EngineDead when
        no restart is left."""
        budget = RestartBudget(self._config.max_engine_restarts)
        while True:
            try:
                reason = await self._live(on_up)
            except HeadwaterError as exc:
                if self._began is None:
                    raise  # a failed first start is a mistake of the operator
                reason = f"a new engine could not start: {exc}"
            self.up = None
            if self.is_stopping:
                on_down(self._describe_end(reason, None))
                return
            before = self._note_death(reason, budget, on_down)
            await asyncio.sleep(_PAUSES_S[min(before, len(_PAUSES_S) - 1)])

    async def check(self) -> None:
        """Kill an engine that does not answer: a stopped process never ends by itself."""
        engine = self._engine
        if engine is None or not engine.is_ready:
            return
        if not await engine.is_running(_SILENT_S) and engine is self._engine:
            log.error("engine does not answer: pid=%d", engine.pid)
            await engine.kill()

    def tell_gone(self, worker: str) -> None:
        """Abort the requests of a worker that has ended."""
        if self._engine is not None:
            self._engine.tell_gone(worker)

    async def end(self) -> None:
        """Stop the engine; kill it if it is still starting."""
        self.is_stopping = True
        if self._engine is not None:
            await (self._engine.stop() if self._engine.is_ready else self._engine.kill())
        self._rundir.close()
        for descriptor in self._host_memory:
            os.close(descriptor)

    async def _live(self, on_up: Callable[[EngineUp], None]) -> str:
        """One life: start an engine, wait for its end, and return the reason."""
        began_s = self._clock.now()
        engine = self._engine = EngineProcess(
            ["headwater.launch.engine", self._config.log_format],
            EngineStart(
                settings=msgspec.Raw(msgspec.json.encode(self._settings())),
                max_queued=self._config.limits.max_queued,
                is_paused=self._state.is_paused,
                host_memory=self._host_memory,
            ),
            self._rundir.address(self._num_lives),
            on_info=self._follow_weights,
            pass_fds=self._host_memory,
        )
        self._num_lives += 1
        info = await engine.start(timeout_s=self._config.start_timeout_s)
        self._load_s = self._clock.now() - began_s
        self.up = self._describe(engine, info)
        if self._num_lives > 1:
            log.warning(
                "engine restarted: pid=%d restarts=%d took_s=%.1f",
                *(engine.pid, self._num_lives - 1, self._load_s),
            )
        on_up(self.up)
        return await engine.wait()

    def _settings(self) -> EngineConfig:
        """Settings of the next engine. From the second engine on, storage that is down does not
        keep an engine from starting. On a CPU, free memory is smaller than it was before the
        host tier filled, so the number of device blocks is that of the first engine."""
        if not self._num_device_blocks:
            return self.engine_config
        config = replace(self.engine_config, storage_is_optional=True)
        if config.device != "cpu":
            return config
        return replace(config, num_blocks_override=self._num_device_blocks)

    def _describe(self, engine: EngineProcess, info: EngineInfo) -> EngineUp:
        self._began = self._began or (unix_s(), self._clock.now())
        self._num_device_blocks = info.num_device_blocks
        return EngineUp(
            address=engine.address,
            info=info,
            created_s=self._began[0],
            started_s=self._began[1],
            num_restarts=self._num_lives - 1,
            num_violations=self._num_violations,
            record=None
            if self._recording is None
            else self._recording.begin(info.block_tokens),
            router_health=list(self._state.router_health.values()),
        )

    def _note_death(
        self, reason: str, budget: RestartBudget, on_down: Callable[[EngineDown], None]
    ) -> int:
        """Report the end of an engine and return the number of restarts before it. Raises
        EngineDead when no restart is left."""
        assert self._engine is not None, "an engine was started"
        self._num_violations += self._engine.has_broken_invariant
        log.error("engine died: pid=%d reason=%s", self._engine.pid, reason)
        before = budget.take(self._clock.now())
        retry_after_s = min(max(1.0, self._load_s), _MAX_RETRY_AFTER_S)
        on_down(self._describe_end(reason, None if before is None else retry_after_s))
        if before is None:
            raise EngineDead(_too_often(reason, budget.max_restarts))
        return before

    def _describe_end(self, reason: str, retry_after_s: float | None) -> EngineDown:
        return EngineDown(
            reason=reason, retry_after_s=retry_after_s, num_violations=self._num_violations
        )

    def _follow_weights(self, info: EngineInfo) -> None:
        """Let the next engine and new workers serve the weights that the engine has loaded."""
        if self.up is not None:
            self.engine_config = replace(self.engine_config, model=info.model_dir)
            self.up = msgspec.structs.replace(self.up, info=info)


def _too_often(reason: str, max_restarts: int) -> str:
    if not max_restarts:
        return reason
    return (
        f"{reason}; {max_restarts + 1} engines died within {WINDOW_S / 60:.0f} minutes "
        f"(--max-engine-restarts {max_restarts}), so the server ends"
    )
