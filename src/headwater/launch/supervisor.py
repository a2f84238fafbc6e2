"""The supervisor: the process of `headwater serve`. Small, without torch, and outlives the others.

It owns the listening port, the memory of the host tier, the engine process and the HTTP workers:

    supervisor ──┬── engine process       one life after another
                 ├── HTTP worker 0        each with a connection of its own to the engine
                 └── HTTP worker 1 …

When the engine dies, the supervisor says why, keeps port and memory, and starts another one. When a
worker dies, it is replaced. When the supervisor dies, all of them end. See decision 18.
"""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headwater.clock import SystemClock
from headwater.config import EngineConfig
from headwater.engine.child import ChildProcess, describe_exit
from headwater.engine.client import EngineInfo
from headwater.engine.engine_process import EngineProcess
from headwater.engine.record_file import RecordFile
from headwater.engine.rundir import RunDir
from headwater.engine.wire import EngineStart, rebuild_error
from headwater.errors import EngineDead, HeadwaterError
from headwater.launch.channel import CallHandler, Channel, ChannelClosed, EventHandler
from headwater.launch.signals import StopSignals, on_hangup, unix_s
from headwater.launch.worker_start import EngineDown, EngineUp, WorkerStart
from headwater.launch.worker_state import WorkerSession, WorkersState
from headwater.server.config import ServerConfig
from headwater.server.listener import url_of
from headwater.server.service import make_fair_share, make_response_store

log = logging.getLogger(__name__)

_WINDOW_S = 600.0
"""Time over which restarts are counted."""

_MAX_WORKER_RESTARTS = 10
"""Most replacements of one worker within that time."""

_PAUSES_S = (0.0, 1.0, 5.0, 15.0)
"""Pause before the first, second … restart in a row: a device may need time to recover."""

_PING_S = 5.0
_WORKER_SILENT_S = 30.0
_ENGINE_SILENT_S = 60.0
_WORKER_END_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a server announces when it is ready."""

    url: str
    model_name: str
    info: EngineInfo
    engine_pid: int
    num_workers: int


class RestartBudget:
    """At most `max_restarts` within `_WINDOW_S`."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self._times: deque[float] = deque()

    def take(self, now: float) -> int | None:
        """Count a restart; how many came before it in the window. None when none is left."""
        while self._times and now - self._times[0] > _WINDOW_S:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return None
        self._times.append(now)
        return len(self._times) - 1


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

    Raises ConfigError or ModelError when the server cannot start, EngineDead when its engine
    died too often.
    """
    clock = SystemClock()
    recording = None if record is None else RecordFile(record, start_s=clock.now())
    if server_config.peer_token is not None:
        # Through the environment, not the settings: /server_info shows settings.
        os.environ["HEADWATER_PEER_TOKEN"] = server_config.peer_token
    try:
        supervisor = Supervisor(engine_config, server_config, listener, announce, recording)
        return asyncio.run(supervisor.run(signals))
    finally:
        if recording is not None:
            recording.close()


class Supervisor:
    """One run of a server. Used on one event loop."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        listener: socket.socket,
        announce: Callable[[Serving], None],
        recording: RecordFile | None = None,
    ) -> None:
        self._engine_config = engine_config
        self._config = config
        self._listener = listener
        self._announce = announce
        self._recording = recording
        self._clock = SystemClock()
        self._rundir = RunDir()
        self._state = WorkersState(make_response_store(config), self._clock)
        self._engine: EngineProcess | None = None
        self._up: EngineUp | None = None
        self._num_lives = 0
        self._num_violations = 0
        self._load_s = 0.0
        self._workers: dict[str, ChildProcess] = {}
        self._is_stopping = False
        self._drain: asyncio.Task[None] | None = None
        self._is_hurried = False

    async def run(self, signals: StopSignals) -> int:
        """Serve until stopped; the exit code."""
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        signals.attach(self._stop)
        on_hangup(self._reload_keys)
        tasks = [
            asyncio.create_task(self._guard(self._run_engine())),
            asyncio.create_task(self._guard(self._check_children())),
        ]
        tasks += [
            asyncio.create_task(self._guard(self._run_worker(index)))
            for index in range(self._config.api_workers)
        ]
        try:
            await self._finished
            return 0
        finally:
            self._is_stopping = True
            await self._end_children()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._rundir.close()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the server; its failure ends the server."""
        try:
            await work
        except Exception as exc:  # noqa: BLE001 -- raised again by `run`
            self._fail(exc)

    def _fail(self, error: Exception) -> None:
        if not self._finished.done():
            self._finished.set_exception(error)

    async def _run_engine(self) -> None:
        """One engine after another, until one may not be restarted."""
        budget = RestartBudget(self._config.max_engine_restarts)
        while True:
            try:
                engine = await self._start_engine()
                await self._tell_up(engine)
                reason = await engine.wait()
            except HeadwaterError as exc:
                if self._up is None:
                    raise  # the first start failed: the operator's mistake
                reason = f"a new engine could not start: {exc}"
            if self._is_stopping:
                return
            await self._restart_or_fail(reason, budget)

    async def _start_engine(self) -> EngineProcess:
        """Start an engine and wait until it takes requests."""
        began_s = self._clock.now()
        settings = msgspec.json.encode(self._engine_config)
        engine = self._engine = EngineProcess(
            ["headwater.launch.engine", self._config.log_format],
            EngineStart(
                settings=msgspec.Raw(settings),
                max_queued=self._config.limits.max_queued,
                is_paused=self._state.is_paused,
            ),
            self._rundir.address(self._num_lives),
            on_info=self._follow_weights,
        )
        self._num_lives += 1
        info = await engine.start(timeout_s=self._config.start_timeout_s)
        self._load_s = self._clock.now() - began_s
        self._up = self._describe(engine, info)
        return engine

    def _describe(self, engine: EngineProcess, info: EngineInfo) -> EngineUp:
        before = self._up
        return EngineUp(
            address=engine.address,
            info=info,
            created_s=unix_s() if before is None else before.created_s,
            started_s=self._clock.now() if before is None else before.started_s,
            num_restarts=self._num_lives - 1,
            num_violations=self._num_violations,
            record=None
            if self._recording is None
            else self._recording.begin(info.block_tokens),
            router_health=list(self._state.router_health.values()),
        )

    async def _tell_up(self, engine: EngineProcess) -> None:
        """Connect all workers to a new engine."""
        assert self._up is not None, "described after its start"
        if self._state.fair_share is None:
            self._state.fair_share = make_fair_share(self._up.info.max_num_seqs)
        if self._num_lives > 1:
            log.warning(
                "engine restarted: pid=%d restarts=%d took_s=%.1f",
                *(engine.pid, self._num_lives - 1, self._load_s),
            )
        await asyncio.gather(*(self._connect(session) for session in self._state.accepting()))

    async def _connect(self, session: WorkerSession) -> None:
        """Tell a worker of the engine; announce the server when the first workers are open."""
        if self._up is None:
            return
        try:
            await session.channel.call("engine_up", self._up)
        except ChannelClosed:
            return
        session.is_open = True
        self._announce_once()

    def _announce_once(self) -> None:
        hubs = self._state.accepting()
        is_complete = len(hubs) == self._config.api_workers and all(
            session.is_open for session in hubs
        )
        if not is_complete or self._up is None or self._engine is None:
            return
        info, announce = self._up.info, self._announce
        self._announce = lambda serving: None
        announce(
            Serving(
                url=url_of(self._listener, tls=self._config.tls is not None),
                model_name=self._config.served_model_name or info.model_name,
                info=info,
                engine_pid=self._engine.pid,
                num_workers=self._config.api_workers,
            )
        )

    async def _restart_or_fail(self, reason: str, budget: RestartBudget) -> None:
        """Tell all workers that the engine is gone, and whether there will be another one."""
        assert self._engine is not None, "there was one"
        self._num_violations += self._engine.has_broken_invariant
        before = budget.take(self._clock.now())
        retry_after_s = None if before is None else max(1.0, self._load_s)
        down = EngineDown(
            reason=reason, retry_after_s=retry_after_s, num_violations=self._num_violations
        )
        for session in self._state.accepting():
            session.channel.tell("engine_down", down)
        log.error("engine died: pid=%d reason=%s", self._engine.pid, reason)
        if before is None:
            raise EngineDead(_too_often(reason, budget.max_restarts))
        await asyncio.sleep(_PAUSES_S[min(before, len(_PAUSES_S) - 1)])

    def _follow_weights(self, info: EngineInfo) -> None:
        """Other weights are served now; a restarted engine and new workers serve them too."""
        if self._up is not None:
            self._engine_config = replace(self._engine_config, model=info.model_dir)
            self._up = msgspec.structs.replace(self._up, info=info)

    async def _run_worker(self, index: int) -> None:
        """One HTTP worker after another in the place `index`."""
        budget = RestartBudget(_MAX_WORKER_RESTARTS)
        for number in range(1 << 30):
            name = f"{index}.{number}"
            code = await self._live_worker(index, name, is_replacement=number > 0)
            if self._engine is not None:
                self._engine.tell_gone(name)
            if self._is_stopping:
                return
            log.error("HTTP worker died: worker=%s %s", name, describe_exit(code))
            if budget.take(self._clock.now()) is None:
                raise EngineDead(
                    f"HTTP worker {index} died {_MAX_WORKER_RESTARTS + 1} times within "
                    f"{_WINDOW_S / 60:.0f} minutes; the last one ended with {describe_exit(code)}"
                )

    async def _live_worker(self, index: int, name: str, *, is_replacement: bool) -> int:
        """Start one worker and talk with it until it ends; its exit code."""
        inherited = [self._listener.fileno()]
        if self._recording is not None:
            inherited.append(self._recording.descriptor)
        child = self._workers[name] = ChildProcess(
            ["headwater.launch.worker"], pass_fds=inherited
        )
        start = WorkerStart(
            name=name,
            listener=self._listener.fileno(),
            engine=self._engine_config,
            server=self._config,
            is_leader=index == 0,
            is_replacement=is_replacement,
        )
        session = WorkerSession(name, self._state)
        reader, writer = await asyncio.open_connection(sock=child.socket)
        calls: dict[str, CallHandler] = {
            **session.calls,
            "hello": partial(_reply, msgspec.json.encode(start)),
        }
        events: dict[str, EventHandler] = {
            **session.events,
            "accepting": partial(self._accepting, session),
            "fatal": self._fatal,
        }
        channel = Channel(reader, writer, calls, events)
        try:
            session.attach(channel)
            await channel.run()
            return await child.end(_WORKER_END_S)
        finally:
            session.detach()
            del self._workers[name]

    def _accepting(self, session: WorkerSession) -> None:
        """A new worker can be called."""
        session.is_accepting = True
        task = asyncio.create_task(self._connect(session))
        session.connecting = task

    def _fatal(self, kind: str, sentence: str) -> None:
        self._fail(rebuild_error(kind, sentence))

    async def _check_children(self) -> None:
        """Kill children that do not answer: a stopped process holds connections for ever."""
        while True:
            await asyncio.sleep(_PING_S)
            await asyncio.gather(
                self._check_engine(),
                *(self._check_worker(session) for session in self._state.accepting()),
            )

    async def _check_worker(self, session: WorkerSession) -> None:
        try:
            async with asyncio.timeout(_WORKER_SILENT_S):
                await session.channel.call("ping")
        except TimeoutError:
            log.error("HTTP worker does not answer: worker=%s", session.name)
            if session.name in self._workers:
                self._workers[session.name].kill()
        except ChannelClosed:
            return

    async def _check_engine(self) -> None:
        engine = self._engine
        if engine is None or not engine.is_ready:
            return
        if not await engine.is_running(_ENGINE_SILENT_S) and engine is self._engine:
            log.error("engine does not answer: pid=%d", engine.pid)
            await engine.kill()

    def _reload_keys(self) -> None:
        for session in self._state.accepting():
            session.channel.tell("reload_keys")

    def _stop(self) -> None:
        """Begin to drain. A second signal aborts running requests and stops at once."""
        is_open = any(session.is_open for session in self._state.accepting())
        if not is_open and self._drain is None:  # still starting: there is nothing to drain
            self._end()
        elif self._drain is None:
            self._is_stopping = True
            self._drain = asyncio.create_task(self._guard(self._finish_and_stop()))
        elif not self._is_hurried:
            self._is_hurried = True
            self._drain.cancel()
            self._drain = asyncio.create_task(self._guard(self._stop_now()))

    def _end(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    async def _finish_and_stop(self) -> None:
        """Let running requests and hand-offs end within the drain timeout, abort the rest, and
        stop listening. Until then health checks and new requests get 503."""
        timeout_s, begin_s = self._config.drain_timeout_s, self._clock.now()
        num_running = await self._ask_all("begin_drain")
        log.info("drain begun: running=%d timeout_s=%g", num_running, timeout_s)
        num_aborted = await self._ask_all("finish_drain", timeout_s)
        took_s = self._clock.now() - begin_s
        log.info("drain ended: took_s=%.1f aborted=%d", took_s, num_aborted)
        self._end()

    async def _stop_now(self) -> None:
        num_running = await self._ask_all("abort_all")
        log.warning("second signal, stopping now: aborted=%d", num_running)
        self._end()

    async def _ask_all(self, name: str, *values: float) -> int:
        """Call all workers; the sum of their answers. A worker that dies answers 0."""

        async def ask(session: WorkerSession) -> int:
            try:
                return int(await session.channel.call(name, *values))
            except ChannelClosed:
                return 0

        return sum(await asyncio.gather(*(ask(session) for session in self._state.accepting())))

    async def _end_children(self) -> None:
        """Workers first, so that their last messages leave; then the engine."""
        if self._drain is not None:
            self._drain.cancel()
        for session in self._state.accepting():
            session.channel.tell("stop")
        workers = list(self._workers.items())
        open_names = {session.name for session in self._state.accepting()}
        for name, child in workers:
            if name not in open_names:
                child.kill()
        await asyncio.gather(*(child.end(_WORKER_END_S) for _, child in workers))
        engine = self._engine
        if engine is None:
            return
        if engine.is_ready:
            await engine.stop()
        else:
            await engine.kill()


async def _reply(value: bytes) -> bytes:
    return value


def _too_often(reason: str, max_restarts: int) -> str:
    if not max_restarts:
        return reason
    return (
        f"{reason}; {max_restarts + 1} engines died within {_WINDOW_S / 60:.0f} minutes "
        f"(--max-engine-restarts {max_restarts}), so the server ends"
    )
