"""Runs the HTTP workers of a server, and replaces those that die."""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

import msgspec

from headwater.clock import Clock
from headwater.engine import wire
from headwater.engine.child import ChildProcess, describe_exit
from headwater.errors import EngineDead, HeadwaterError
from headwater.launch.engine_lives import EngineLives
from headwater.launch.process_channel import (
    CallHandler,
    EventHandler,
    ProcessChannel,
    ProcessGone,
)
from headwater.launch.restarts import WINDOW_S, RestartBudget
from headwater.launch.worker_start import EngineDown, WorkerStart
from headwater.launch.worker_state import WorkerSession, WorkersState
from headwater.server.config import ServerConfig
from headwater.server.connection_counts import make_counts_file

log = logging.getLogger(__name__)

_MAX_RESTARTS = 10
"""Maximum number of replacements of one worker within `WINDOW_S`."""

_SILENT_S = 30.0
"""A worker that does not answer for this time is killed: it is stopped or hangs."""

_END_S = 15.0


class HttpWorkers:
    """Owns the HTTP worker processes. Used on one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        state: WorkersState,
        engines: EngineLives,
        clock: Clock,
        inherited: tuple[int, ...] = (),
    ) -> None:
        """Workers inherit the descriptors `inherited` in addition to the listener's."""
        self._config = config
        self._listener = listener
        self._state = state
        self._engines = engines
        self._clock = clock
        self._counts = make_counts_file(config.api_workers)
        self._inherited = (self._counts, *inherited)
        self._children: dict[str, ChildProcess] = {}
        self.is_stopping = False
        """True when the server ends: then a worker that ends is not replaced."""
        self.on_open: Callable[[], None] = lambda: None
        """Called when a worker begins to serve requests."""
        self.on_fatal: Callable[[HeadwaterError], None] = lambda error: None
        """Called when a worker reports that the server must end."""

    @property
    def is_open(self) -> bool:
        """Whether any worker serves requests."""
        return any(session.is_open for session in self._state.accepting())

    @property
    def is_complete(self) -> bool:
        """Whether every worker serves requests."""
        num_open = sum(session.is_open for session in self._state.accepting())
        return num_open == self._config.api_workers

    async def run(self, index: int) -> None:
        """Run one worker after another at the place `index`. Raises EngineDead when they die
        too often."""
        budget = RestartBudget(_MAX_RESTARTS)
        number = 0
        while True:
            name = f"{index}.{number}"
            code = await self._live(index, name, is_replacement=number > 0)
            self._engines.tell_gone(name)
            if self.is_stopping:
                return
            log.error("HTTP worker died: worker=%s %s", name, describe_exit(code))
            if budget.take(self._clock.now()) is None:
                raise EngineDead(
                    f"HTTP worker {index} died {_MAX_RESTARTS + 1} times within "
                    f"{WINDOW_S / 60:.0f} minutes; the last one ended with {describe_exit(code)}"
                )
            number += 1

    def connect_all(self) -> None:
        """Connect every worker to the current engine."""
        for session in self._state.accepting():
            session.connecting = asyncio.create_task(self._connect(session))

    def tell_down(self, down: EngineDown) -> None:
        """Tell every worker that the engine has ended."""
        for session in self._state.accepting():
            session.channel.tell("engine_down", down)

    def reload_keys(self) -> None:
        """Let every worker read the file of keys again."""
        for session in self._state.accepting():
            session.channel.tell("reload_keys")

    async def ask_all(self, name: str, *values: float) -> int:
        """Call every worker and return the sum of the answers. A worker that dies counts as
        0."""

        async def ask(session: WorkerSession) -> int:
            try:
                return int(await session.channel.call(name, *values))
            except ProcessGone:
                return 0

        return sum(await asyncio.gather(*(ask(s) for s in self._state.accepting())))

    async def check(self) -> None:
        """Kill workers that do not answer: a stopped process holds its connections for ever."""
        await asyncio.gather(*(self._check(session) for session in self._state.accepting()))

    async def end(self) -> None:
        """Stop all workers; those that never served are killed."""
        self.is_stopping = True
        open_names = {session.name for session in self._state.accepting()}
        for session in self._state.accepting():
            session.channel.tell("stop")
        children = list(self._children.items())
        for name, child in children:
            if name not in open_names:
                child.kill()
        await asyncio.gather(*(child.end(_END_S) for _, child in children))

    async def _live(self, index: int, name: str, *, is_replacement: bool) -> int:
        """Start one worker, serve its calls until it ends, and return its exit code."""
        listener = self._listener.fileno()
        child = self._children[name] = ChildProcess(
            ["headwater.launch.worker"], pass_fds=(listener, *self._inherited)
        )
        start = WorkerStart(
            name=name,
            listener=listener,
            index=index,
            connections=self._counts,
            engine=self._engines.engine_config,
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
        channel = ProcessChannel(reader, writer, calls, events)
        try:
            session.attach(channel)
            await channel.run()
            code = await child.end(_END_S)
            await child.end_group()
            return code
        finally:
            session.detach()
            del self._children[name]

    def _accepting(self, session: WorkerSession) -> None:
        """Mark a new worker as ready for calls, and connect it to the engine."""
        session.is_accepting = True
        session.connecting = asyncio.create_task(self._connect(session))

    async def _connect(self, session: WorkerSession) -> None:
        """Connect one worker to the engine, if there is one."""
        if self._engines.up is None:
            return
        try:
            await session.channel.call("engine_up", self._engines.up)
        except ProcessGone:
            return
        session.is_open = True
        self.on_open()

    async def _check(self, session: WorkerSession) -> None:
        try:
            async with asyncio.timeout(_SILENT_S):
                await session.channel.call("ping")
        except TimeoutError:
            log.error("HTTP worker does not answer: worker=%s", session.name)
            if session.name in self._children:
                self._children[session.name].kill()
        except ProcessGone:
            return

    def _fatal(self, kind: str, sentence: str) -> None:
        self.on_fatal(wire.rebuild_error(kind, sentence))


async def _reply(value: bytes) -> bytes:
    return value
