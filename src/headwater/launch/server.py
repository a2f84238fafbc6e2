"""The HTTP process: starts the engine process, serves, drains, ends. No torch."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvloop

from headwater.clock import SystemClock
from headwater.config import EngineConfig
from headwater.engine.child import EngineChild
from headwater.engine.client import EngineInfo, GetStats
from headwater.engine.front import AsyncEngine
from headwater.engine.recorded import RecordedEngine, Recording
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import EngineDead
from headwater.metrics.ledger import RequestRecord
from headwater.metrics.logs import log_record
from headwater.metrics.tracing import SpanExporter, open_spans
from headwater.server.access import make_access_policy
from headwater.server.app import create_app
from headwater.server.config import ServerConfig
from headwater.server.http import CLOSE_S, HttpServer, url_of
from headwater.server.keys import KeyRing
from headwater.server.middleware import ReadinessMiddleware
from headwater.server.registration import Memberships
from headwater.server.service import Service

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""Interval of checks for hand-offs that are still running."""


def unix_s() -> float:
    """Unix time."""
    return datetime.now().timestamp()


def reload_on_hangup(keys: KeyRing, path: str | None) -> None:
    """Read the keys file again on SIGHUP."""
    if path is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)


class StopSignals:
    """Records SIGTERM and SIGINT until a handler is attached.

    A signal during start is neither fatal nor lost.
    """

    def __init__(self) -> None:
        self._was_signalled = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def attach(self, stop: Callable[[], None]) -> None:
        """Call `stop` in the running event loop for earlier and later signals."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if self._was_signalled:
            stop()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._was_signalled = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a server announces when it is ready."""

    url: str
    model_name: str
    info: EngineInfo
    engine_pid: int


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[Serving], None],
    signals: StopSignals,
    record: Path | None = None,
) -> int:
    """Serve on a bound socket until one of `signals`; the exit code. Requests are recorded in
    the file `record` if one is given.

    Raises ConfigError or ModelError when the server cannot start.
    """
    recording = None if record is None else Recording(record, SystemClock())
    if server_config.peer_token is not None:
        # Through the environment, not the settings: /server_info shows settings.
        os.environ["HEADWATER_PEER_TOKEN"] = server_config.peer_token
    child = EngineChild(
        ["headwater.launch.engine", server_config.log_format],
        msgspec.json.encode(engine_config),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        engine = AsyncEngine(child)
        if recording is not None:
            engine = RecordedEngine(child, recording)
        server = _Server(engine, engine_config, server_config, listener, announce)
        return runner.run(server.run(signals))


class _Server:
    """One run of the HTTP process: start, open, drain, end."""

    def __init__(
        self,
        engine: AsyncEngine,
        engine_config: EngineConfig,
        config: ServerConfig,
        listener: socket.socket,
        announce: Callable[[Serving], None],
    ) -> None:
        self._engine = engine
        self._engine_config = engine_config
        self._config = config
        self._listener = listener
        self._announce = announce
        self._service: Service | None = None
        self._spans: SpanExporter | None = None
        self._drain: asyncio.Task[None] | None = None
        self._is_hurried = False
        self._memberships: Memberships | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._access = make_access_policy(config, SystemClock(), unix_s)
        self._readiness = ReadinessMiddleware(self._access)
        self._http = HttpServer(
            self._readiness,
            tls=config.tls,
            limits=config.connections,
        )

    async def run(self, signals: StopSignals) -> int:
        """Serve until stopped; the exit code."""
        signals.attach(self._stop)
        reload_on_hangup(self._access.keys, self._config.api_keys_file)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        start = asyncio.create_task(self._start())
        try:
            await asyncio.wait({http, start}, return_when=asyncio.FIRST_COMPLETED)
            if not start.done():  # stopped before the model was loaded
                start.cancel()
                return 0
            start.result()
            return await self._serve_out(http)
        finally:
            self._http.stop()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(start, http, return_exceptions=True)
            if self._drain is not None:
                self._drain.cancel()
            if self._leaving is not None:
                await self._leaving
            await self._engine.close()
            if self._service is not None:
                self._service.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    async def _start(self) -> None:
        engine, config = self._engine, self._config
        await engine.start(timeout_s=config.start_timeout_s)
        tokenizer = await asyncio.to_thread(Tokenizer, engine.info.model_dir)
        service = self._service = Service(
            engine,
            tokenizer,
            config,
            SystemClock(),
            created_s=unix_s(),
            engine_config=self._engine_config,
            on_end=self._ledgers(engine.info.model_name),
        )
        self._readiness.open(create_app(service))
        self._announce(
            Serving(
                url=url_of(self._listener, tls=config.tls is not None),
                model_name=service.model_name,
                info=engine.info,
                engine_pid=engine.pid,
            )
        )

    def _ledgers(self, model: str) -> list[Callable[[RequestRecord], None]]:
        """Receivers of the record of each finished request."""
        receivers: list[Callable[[RequestRecord], None]] = []
        if self._config.log_format == "json":
            receivers.append(log_record)
        self._spans = open_spans(os.environ, model=self._config.served_model_name or model)
        if self._spans is not None:
            receivers.append(self._spans.record)
        return receivers

    async def _serve_out(self, http: "asyncio.Task[None]") -> int:
        """Wait until HTTP has drained, all routers refuse the first registration, or the engine
        died and `exit_with_engine` is set."""
        death = asyncio.create_task(self._engine.wait_dead())
        membership = asyncio.create_task(self._stay_registered())
        try:
            wanted: set[asyncio.Task[Any]] = {http, membership}
            if self._config.exit_with_engine:
                wanted.add(death)
            while not http.done():
                ended, wanted = await asyncio.wait(wanted, return_when=asyncio.FIRST_COMPLETED)
                if membership in ended:
                    membership.result()
                if death in ended:
                    raise EngineDead(death.result())
            return 0
        finally:
            death.cancel()
            membership.cancel()

    async def _hand_over(self) -> None:
        """Finish hand-offs that other instances wait for, within the drain timeout. A second
        signal skips this."""
        if self._engine.dead is not None or not self._engine.info.peer_address:
            return
        with contextlib.suppress(TimeoutError, EngineDead):
            async with asyncio.timeout(self._config.drain_timeout_s):
                while not self._is_hurried and await self._num_handoffs():  # noqa: ASYNC110 -- the engine has no event
                    await asyncio.sleep(_LOOK_S)

    async def _num_handoffs(self) -> int:
        sides = (await self._engine.control(GetStats())).handoffs.values()
        return sum(side.in_flight for side in sides)

    async def _stay_registered(self) -> None:
        """Keep registered at the routers, if there are any. Raises ConfigError."""
        if self._config.routers and self._service is not None:
            url = url_of(self._listener, tls=self._config.tls is not None)
            self._memberships = Memberships(
                self._service, url=url, cluster=self._access.cluster
            )
            await self._memberships.run()

    def _stop(self) -> None:
        """Begin to drain. A second signal aborts running requests and stops at once."""
        if self._service is None:  # still starting: there is nothing to drain
            self._http.stop()
            return
        loop = asyncio.get_running_loop()
        self._service.is_stopping = True
        self._readiness.drain()
        if self._memberships is not None and self._leaving is None:
            self._leaving = loop.create_task(self._memberships.leave())
        if self._drain is None:
            self._drain = loop.create_task(self._finish_and_stop())
        elif not self._is_hurried:
            self._is_hurried = True
            self._drain.cancel()
            self._drain = loop.create_task(self._stop_now())

    async def _finish_and_stop(self) -> None:
        """Let running requests and hand-offs end within the drain timeout, abort the rest, and
        stop listening. Until then health checks and new requests get 503."""
        timeout_s, begin_s = self._config.drain_timeout_s, unix_s()
        num_running, num_aborted = self._readiness.num_running, 0
        log.info("drain begun: running=%d timeout_s=%g", num_running, timeout_s)
        try:
            if not await self._readiness.wait_idle(timeout_s):
                num_aborted = self._readiness.num_running
                await self._abort_all()
            await self._hand_over()
        finally:
            self._http.stop()
        log.info("drain ended: took_s=%.1f aborted=%d", unix_s() - begin_s, num_aborted)

    async def _stop_now(self) -> None:
        log.warning("second signal, stopping now: aborted=%d", self._readiness.num_running)
        try:
            await self._abort_all()
        finally:
            self._http.stop()

    async def _abort_all(self) -> None:
        """Abort running requests: clients get a last event, not a broken connection."""
        with contextlib.suppress(EngineDead):
            await self._engine.abort(None)
        await self._readiness.wait_idle(CLOSE_S)
