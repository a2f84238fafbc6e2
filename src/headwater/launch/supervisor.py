"""The supervisor: the process of `headwater serve`. It is small, has no torch, and outlives the
other processes.

It owns the listening port, the memory of the host tier, the engine process and the HTTP workers:

    supervisor ──┬── engine process       one life after another
                 ├── HTTP worker 0        each with a connection of its own to the engine
                 └── HTTP worker 1 …

When the engine dies, the supervisor logs the reason, keeps port and memory, and starts another
one. When a worker dies, it is replaced. When the supervisor dies, all other processes end. See
decision 18.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.clock import SystemClock
from headwater.config import EngineConfig
from headwater.engine.child import adopt_orphans
from headwater.engine.client import SERVER_ID_VARIABLE, EngineInfo
from headwater.engine.record_file import RecordFile
from headwater.launch.engine_lives import EngineLives
from headwater.launch.http_workers import HttpWorkers
from headwater.launch.signals import StopSignals, on_hangup
from headwater.launch.worker_start import EngineUp
from headwater.launch.worker_state import WorkersState
from headwater.server.config import ServerConfig
from headwater.server.listener import url_of
from headwater.server.service import make_fair_share, make_response_store

log = logging.getLogger(__name__)

_CHECK_S = 5.0
"""Time between two checks of the children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a server announces when it is ready."""

    url: str
    model_name: str
    info: EngineInfo
    engine_pid: int
    num_workers: int


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[Serving], None],
    signals: StopSignals,
    record: Path | None = None,
) -> int:
    """Serve on a bound socket until one of `signals`, and return the exit code. Requests are
    recorded in the file `record` if one is given.

    Raises ConfigError or ModelError when the server cannot start, EngineDead when its engine
    died too often.
    """
    clock = SystemClock()
    recording = None if record is None else RecordFile(record, start_s=clock.now())
    os.environ[SERVER_ID_VARIABLE] = secrets.token_hex(8)
    if server_config.peer_token is not None:
        # Through the environment, not the settings: /server_info shows settings.
        os.environ["HEADWATER_PEER_TOKEN"] = server_config.peer_token
    try:
        supervisor = ServerSupervisor(
            engine_config, server_config, listener, announce, recording
        )
        return asyncio.run(supervisor.run(signals))
    finally:
        if recording is not None:
            recording.close()


class ServerSupervisor:
    """One run of a server. Used on one event loop."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        listener: socket.socket,
        announce: Callable[[Serving], None],
        recording: RecordFile | None = None,
    ) -> None:
        self._config = config
        self._listener = listener
        self._announce: Callable[[Serving], None] | None = announce
        self._clock = SystemClock()
        self._state = WorkersState(make_response_store(config), self._clock)
        self._engines = EngineLives(engine_config, config, self._state, self._clock, recording)
        self._workers = HttpWorkers(
            config,
            listener,
            self._state,
            self._engines,
            self._clock,
            () if recording is None else (recording.descriptor,),
        )
        self._workers.on_open = self._announce_once
        self._workers.on_fatal = self._fail
        self._drain: asyncio.Task[None] | None = None
        self._is_hurried = False

    async def run(self, signals: StopSignals) -> int:
        """Serve until stopped; return the exit code."""
        adopt_orphans()
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        signals.attach(self._stop)
        on_hangup(self._workers.reload_keys)
        parts = [
            self._engines.run(self._engine_up, self._workers.tell_down),
            self._check_children(),
            *(self._workers.run(index) for index in range(self._config.api_workers)),
        ]
        tasks = [asyncio.create_task(self._guard(part)) for part in parts]
        try:
            await self._finished
            return 0
        finally:
            self._engines.is_stopping = True
            if self._drain is not None:
                self._drain.cancel()
            # Workers end first, so that their last messages are sent.
            await self._workers.end()
            await self._engines.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the server; its failure ends the server."""
        try:
            await work
        except Exception as exc:  # noqa: BLE001 -- raised again by `run`
            self._fail(exc)

    def _fail(self, error: Exception) -> None:
        if not self._finished.done():
            self._finished.set_exception(error)

    def _engine_up(self, up: EngineUp) -> None:
        if self._state.fair_share is None:
            self._state.fair_share = make_fair_share(up.info.max_num_seqs)
        self._workers.connect_all()

    def _announce_once(self) -> None:
        """Announce the server when every worker serves for the first time."""
        up, announce = self._engines.up, self._announce
        if up is None or announce is None or not self._workers.is_complete:
            return
        self._announce = None
        announce(
            Serving(
                url=url_of(self._listener, tls=self._config.tls is not None),
                model_name=self._config.served_model_name or up.info.model_name,
                info=up.info,
                engine_pid=self._engines.pid,
                num_workers=self._config.api_workers,
            )
        )

    async def _check_children(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            await asyncio.gather(self._engines.check(), self._workers.check())

    def _stop(self) -> None:
        """Begin to drain. A second signal aborts running requests and stops at once."""
        if not self._workers.is_open and self._drain is None:
            self._end()  # still starting: there is nothing to drain
        elif self._drain is None:
            self._engines.is_stopping = self._workers.is_stopping = True
            self._drain = asyncio.create_task(self._guard(self._finish_and_stop()))
        elif not self._is_hurried:
            self._is_hurried = True
            self._drain.cancel()
            self._drain = asyncio.create_task(self._guard(self._stop_now()))

    def _end(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    async def _finish_and_stop(self) -> None:
        """Let running requests and hand-offs end within the drain timeout, abort the others,
        and stop listening. Until then health checks and new requests get 503."""
        timeout_s, begin_s = self._config.drain_timeout_s, self._clock.now()
        num_running = await self._workers.ask_all("begin_drain")
        log.info("drain begun: running=%d timeout_s=%g", num_running, timeout_s)
        num_aborted = await self._workers.ask_all("finish_drain", timeout_s)
        took_s = self._clock.now() - begin_s
        log.info("drain ended: took_s=%.1f aborted=%d", took_s, num_aborted)
        self._end()

    async def _stop_now(self) -> None:
        num_aborted = await self._workers.ask_all("abort_all")
        log.warning("second signal, stopping now: aborted=%d", num_aborted)
        self._end()
