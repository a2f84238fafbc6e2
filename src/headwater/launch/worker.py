"""An HTTP worker process: `python -m headwater.launch.worker`, started by the supervisor. No torch.

It accepts connections of the shared port, tokenizes, streams text, and has a connection of its own
to the engine. The supervisor tells it when the engine is up or lost, when to drain and when to stop.
It ends at once when the supervisor is gone.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop

from headwater.clock import SystemClock
from headwater.engine.client import GetStats
from headwater.engine.recorded import RecordedEngine
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import ConfigError, EngineDead, HeadwaterError
from headwater.launch.process_channel import CallHandler, EventHandler, ProcessChannel
from headwater.launch.signals import unix_s
from headwater.launch.worker_start import EngineDown, EngineUp, WorkerStart
from headwater.launch.worker_state import RemoteState
from headwater.metrics.ledger import RequestRecord
from headwater.metrics.logs import log_record, set_up_logs
from headwater.metrics.tracing import SpanExporter, open_spans
from headwater.server.access import make_access_policy
from headwater.server.answers import RouterHealth
from headwater.server.app import create_app
from headwater.server.connection_counts import ConnectionCounts
from headwater.server.http import CLOSE_S, HttpServer
from headwater.server.listener import url_of
from headwater.server.middleware import ReadinessMiddleware
from headwater.server.registration import Memberships
from headwater.server.sampler import HistorySampler
from headwater.server.service import Service
from headwater.server.shared_state import AbortScope

_SUPERVISOR = 0
"""Standard input: a socket that joins this process with the supervisor."""

_LOOK_S = 0.05
"""Interval of checks for hand-offs that are still running."""


class Worker:
    """One HTTP worker: start, open, drain, end."""

    def __init__(self, start: WorkerStart, channel: Callable[[], ProcessChannel]) -> None:
        self._start = start
        self._config = config = start.server
        self._channel = channel
        self._shared = RemoteState(channel)
        self._engine = RecordedEngine(start.name)
        self._listener = socket.socket(fileno=start.listener)
        self._service: Service | None = None
        self._opening = asyncio.Lock()
        """Held while the tokenizer is loaded: engines may restart meanwhile."""
        self._spans: SpanExporter | None = None
        self._memberships: Memberships | None = None
        self._membership: asyncio.Task[None] | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._access = make_access_policy(config, SystemClock(), unix_s, limits=self._shared)
        self._readiness = ReadinessMiddleware(self._access)
        self._http = HttpServer(
            self._readiness,
            tls=config.tls,
            limits=config.connections,
            counts=ConnectionCounts(start.connections, start.index),
        )
        self.calls: dict[str, CallHandler] = {
            "engine_up": self._engine_up,
            "snapshot": self._snapshot,
            "abort_here": self._abort_here,
            "begin_drain": self._begin_drain,
            "finish_drain": self._finish_drain,
            "abort_all": self._abort_all,
            "ping": self._ping,
        }
        self.events: dict[str, EventHandler] = {
            "engine_down": self._engine_down,
            "router_health": self._set_router_health,
            "reload_keys": self._access.keys.reload,
            "stop": self._http.stop,
        }

    async def serve(self) -> None:
        """Serve until the supervisor sends a stop."""
        try:
            await self._http.serve(sockets=[self._listener])
        finally:
            for task in (self._membership, self._leaving, self._sampling):
                if task is not None:
                    task.cancel()
            await self._engine.close()
            if self._service is not None:
                self._service.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    async def _engine_up(self, message: dict[str, Any]) -> None:
        up = msgspec.convert(message, type=EngineUp)
        self._engine.num_restarts, self._engine.num_violations = (
            up.num_restarts,
            up.num_violations,
        )
        if up.record is not None:
            self._engine.record(up.record)
        self._engine.attach(up.address, up.info)
        async with self._opening:
            if self._service is None:
                await self._open(up)

    async def _open(self, up: EngineUp) -> None:
        """Build the application; from now on requests are served."""
        tokenizer = await asyncio.to_thread(Tokenizer, up.info.model_dir)
        service = self._service = Service(
            self._engine,
            tokenizer,
            self._config,
            SystemClock(),
            created_s=up.created_s,
            engine_config=self._start.engine,
            on_end=self._ledgers(up.info.model_name),
        )
        service.join(self._shared, started_s=up.started_s)
        service.router_health = {health.url: health for health in up.router_health}
        self._readiness.open(create_app(service))
        if self._start.is_leader:
            self._sampling = asyncio.create_task(HistorySampler(service).run())
        if self._start.is_leader and self._config.routers:
            self._membership = asyncio.create_task(self._stay_registered(service))

    def _engine_down(self, message: dict[str, Any]) -> None:
        down = msgspec.convert(message, type=EngineDown)
        self._engine.num_violations = down.num_violations
        self._engine.lose(down.reason, retry_after_s=down.retry_after_s)

    def _ledgers(self, model: str) -> list[Callable[[RequestRecord], None]]:
        """Receivers of the record of each finished request."""
        receivers: list[Callable[[RequestRecord], None]] = []
        if self._config.log_format == "json":
            receivers.append(log_record)
        self._spans = open_spans(os.environ, model=self._config.served_model_name or model)
        if self._spans is not None:
            receivers.append(self._spans.record)
        return receivers

    async def _stay_registered(self, service: Service) -> None:
        """Keep the server registered at the routers. If all of them refuse the first
        registration, the server ends."""
        self._memberships = Memberships(
            service,
            url=url_of(self._listener, tls=self._config.tls is not None),
            cluster=self._access.cluster,
            was_accepted=self._start.is_replacement,
        )
        try:
            await self._memberships.run()
        except ConfigError as exc:
            self._channel().tell("fatal", type(exc).__name__, str(exc))

    async def _snapshot(self) -> Any:  # noqa: ANN401 -- builtins
        if self._service is None:
            return {"counts": {}}
        return self._service.snapshot()

    async def _abort_here(self, scope: dict[str, Any]) -> int:
        if self._service is None:
            return 0
        return await self._service.abort_here(msgspec.convert(scope, type=AbortScope))

    async def _begin_drain(self) -> int:
        """Refuse new work; return the number of running requests."""
        if self._service is not None:
            self._service.is_stopping = True
        self._readiness.drain()
        if self._memberships is not None and self._leaving is None:
            self._leaving = asyncio.create_task(self._memberships.leave())
        return self._readiness.num_running

    async def _finish_drain(self, timeout_s: float) -> int:
        """Let running requests and, in the first worker, hand-offs end; abort the others and
        return their number."""
        num_aborted = 0
        if not await self._readiness.wait_idle(timeout_s):
            num_aborted = self._readiness.num_running
            await self._abort_all()
        if self._start.is_leader:
            await self._hand_over(timeout_s)
            if self._leaving is not None:
                await self._leaving
        return num_aborted

    async def _abort_all(self) -> int:
        """Abort running requests: clients get a last event, not a broken connection."""
        num_running = self._readiness.num_running
        if self._service is not None:
            with contextlib.suppress(EngineDead):
                await self._service.abort_here(AbortScope())
        await self._readiness.wait_idle(CLOSE_S)
        return num_running

    async def _hand_over(self, timeout_s: float) -> None:
        """Finish hand-offs that other instances wait for."""
        if self._engine.dead is not None or not self._engine.info.peer_address:
            return
        with contextlib.suppress(TimeoutError, HeadwaterError):
            async with asyncio.timeout(timeout_s):
                while await self._num_handoffs():  # noqa: ASYNC110 -- the engine has no event
                    await asyncio.sleep(_LOOK_S)

    async def _num_handoffs(self) -> int:
        sides = (await self._engine.control(GetStats())).handoffs.values()
        return sum(side.in_flight for side in sides)

    async def _ping(self) -> None:
        """Answer the supervisor; the answer shows that the event loop runs."""

    def _set_router_health(self, health: dict[str, Any]) -> None:
        if self._service is not None:
            found = msgspec.convert(health, type=RouterHealth)
            self._service.router_health[found.url] = found


async def _run_worker() -> int:
    """The main function of a worker; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides when to stop
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=_SUPERVISOR))
    calls: dict[str, CallHandler] = {}
    events: dict[str, EventHandler] = {}
    channel = ProcessChannel(reader, writer, calls, events)
    conversation = asyncio.create_task(channel.run())
    start = msgspec.json.decode(await channel.call("hello"), type=WorkerStart)
    set_up_logs(start.server.log_format, speaker=f"worker {start.name}")
    worker = Worker(start, lambda: channel)
    calls.update(worker.calls)
    events.update(worker.events)
    channel.tell("accepting")
    serving = asyncio.create_task(worker.serve())
    await asyncio.wait({conversation, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        os._exit(1)  # the supervisor is gone, and so is the engine
    return 0


def main() -> int:
    """Run a worker; return the exit code."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run_worker())


if __name__ == "__main__":
    sys.exit(main())
