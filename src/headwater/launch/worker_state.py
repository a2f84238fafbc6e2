"""State that all HTTP workers share. The supervisor keeps it; each worker uses it through a
channel.

`WorkerSession` runs in the supervisor. `RemoteState` is a worker's `SharedState` and `KeyLimiter`.
When a worker dies, its session releases everything that the worker held.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from headwater.clock import Clock
from headwater.errors import EngineDead
from headwater.launch.process_channel import (
    CallHandler,
    EventHandler,
    ProcessChannel,
    ProcessGone,
)
from headwater.metrics.history import HistoryPoint, RateHistory
from headwater.metrics.recorder import Recorder, RecorderSnapshot
from headwater.server.answers import RouterHealth
from headwater.server.fair_share import FairShare
from headwater.server.key_limits import KeyLimits, KeyRefusal
from headwater.server.keys import ApiKey
from headwater.server.response_store import ResponseStore
from headwater.server.shared_state import AbortScope, WorkerSnapshot

_GATHER_TIMEOUT_S = 2.0
"""Longest wait for one worker. For a worker that does not answer, its last snapshot counts."""


class WorkersState:
    """The shared state: limits, shares, stored responses, and the counts of dead workers."""

    def __init__(self, responses: ResponseStore, clock: Clock) -> None:
        self.responses = responses
        self.clock = clock
        self.key_limits = KeyLimits(clock)
        self.fair_share: FairShare | None = None
        """Created when the size of the engine is known."""
        self.workers: dict[str, WorkerSession] = {}
        """Connected workers by name."""
        self.past: list[WorkerSnapshot] = []
        """Counts of workers that died, joined into one entry."""
        self.history = RateHistory()
        self.router_health: dict[str, RouterHealth] = {}
        self.is_paused = False

    def accepting(self) -> "list[WorkerSession]":
        """Workers that can be called."""
        return [worker for worker in self.workers.values() if worker.is_accepting]


class WorkerSession:
    """The supervisor's side of one worker's channel."""

    def __init__(self, name: str, state: WorkersState) -> None:
        self.name = name
        self._state = state
        self._channel: ProcessChannel | None = None
        self.is_accepting = False
        """Whether the worker can be called."""
        self.is_open = False
        """Whether the worker serves requests."""
        self.connecting: asyncio.Task[None] | None = None
        self._keys: Counter[str] = Counter()
        self._entries: dict[int, asyncio.Task[None]] = {}
        self._last = WorkerSnapshot(counts=RecorderSnapshot())
        self.calls: dict[str, CallHandler] = {
            "start_key": self._start_key,
            "enter_engine": self._enter_engine,
            "get_response": self._get_response,
            "snapshots": self._snapshots,
            "history": self._history,
            "abort": self._abort,
        }
        self.events: dict[str, EventHandler] = {
            "end_key": self._end_key,
            "leave_engine": self._leave_engine,
            "put_response": self._put_response,
            "remove_response": state.responses.remove,
            "router_health": self._set_router_health,
            "paused": self._set_paused,
            "history_point": self._add_point,
        }

    @property
    def channel(self) -> ProcessChannel:
        assert self._channel is not None, "attach() was not called"
        return self._channel

    def attach(self, channel: ProcessChannel) -> None:
        """Add the worker, which is connected by `channel` now."""
        self._channel = channel
        self._state.workers[self.name] = self

    def detach(self) -> None:
        """Remove the worker, which has ended, and release everything that it held. Its counts
        stay."""
        self._state.workers.pop(self.name, None)
        for name in self._keys.elements():
            self._state.key_limits.end(name)
        self._keys.clear()
        for task in self._entries.values():
            task.cancel()
        self._entries.clear()
        counts = [entry.counts for entry in (*self._state.past, self._last)]
        self._state.past = [WorkerSnapshot(counts=Recorder.join(counts).snapshot())]

    async def snapshot(self) -> WorkerSnapshot:
        """The counts and running requests of the worker; its last answer if it does not
        answer."""
        try:
            async with asyncio.timeout(_GATHER_TIMEOUT_S):
                answer = await self.channel.call("snapshot")
            self._last = msgspec.convert(answer, type=WorkerSnapshot)
        except (TimeoutError, ProcessGone):
            pass
        return self._last

    async def abort_here(self, scope: dict[str, Any]) -> int:
        try:
            async with asyncio.timeout(_GATHER_TIMEOUT_S):
                return int(await self.channel.call("abort_here", scope))
        except (TimeoutError, ProcessGone):
            return 0

    async def _start_key(self, key: dict[str, Any]) -> Any:  # noqa: ANN401 -- a refusal or None
        refusal = self._state.key_limits.start(msgspec.convert(key, type=ApiKey))
        if refusal is None:
            self._keys[key["name"]] += 1
        return refusal

    def _end_key(self, name: str) -> None:
        self._keys[name] -= 1
        self._state.key_limits.end(name)

    async def _enter_engine(
        self, entry: int, key: str, share: float, num_sequences: int
    ) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._hold(granted, key, share, num_sequences))
        self._entries[entry] = task
        await asyncio.wait({granted, task}, return_when=asyncio.FIRST_COMPLETED)

    async def _hold(
        self, granted: "asyncio.Future[None]", key: str, share: float, num_sequences: int
    ) -> None:
        """Enter the engine, and leave it when this task is cancelled."""
        fair_share = self._state.fair_share
        assert fair_share is not None, "made before workers take requests"
        async with fair_share.enter(key, share, num_sequences):
            granted.set_result(None)
            await asyncio.Event().wait()

    def _leave_engine(self, entry: int) -> None:
        task = self._entries.pop(entry, None)
        if task is not None:
            task.cancel()

    def _put_response(self, response_id: str, cache_salt: str, data: bytes) -> None:
        now = self._state.clock.now()
        self._state.responses.put(response_id, cache_salt, data, now=now)

    async def _get_response(self, response_id: str, cache_salt: str) -> bytes | None:
        responses, clock = self._state.responses, self._state.clock
        found = responses.get(response_id, cache_salt, now=clock.now())
        if found is None:
            # Another worker may have sent it a moment ago. Each channel keeps its order, so
            # after an answer of every worker it has arrived.
            await self._snapshots()
            found = responses.get(response_id, cache_salt, now=clock.now())
        return found

    async def _snapshots(self) -> list[Any]:
        workers = self._state.accepting()
        found = await asyncio.gather(*(worker.snapshot() for worker in workers))
        return [*self._state.past, *found]

    async def _history(self, after_unix_s: float) -> list[HistoryPoint]:
        return self._state.history.after(after_unix_s)

    def _add_point(self, point: dict[str, Any]) -> None:
        self._state.history.add(msgspec.convert(point, type=HistoryPoint))

    async def _abort(self, scope: dict[str, Any]) -> int:
        workers = self._state.accepting()
        return sum(await asyncio.gather(*(worker.abort_here(scope) for worker in workers)))

    def _set_router_health(self, health: dict[str, Any]) -> None:
        self._state.router_health[health["url"]] = msgspec.convert(health, type=RouterHealth)
        for worker in self._state.accepting():
            worker.channel.tell("router_health", health)

    def _set_paused(self, is_paused: bool) -> None:
        self._state.is_paused = is_paused


class RemoteState:
    """A worker's access to the shared state; implements `SharedState` and `KeyLimiter`."""

    def __init__(self, channel: Callable[[], ProcessChannel]) -> None:
        self._channel = channel
        self._entries = itertools.count()

    async def snapshots(self) -> list[WorkerSnapshot]:
        answer = await self._call("snapshots")
        return msgspec.convert(answer, type=list[WorkerSnapshot])

    def add_point(self, point: HistoryPoint) -> None:
        self._channel().tell("history_point", point)

    async def history(self, after_unix_s: float) -> list[HistoryPoint]:
        answer = await self._call("history", after_unix_s)
        return msgspec.convert(answer, type=list[HistoryPoint])

    async def abort(self, scope: AbortScope) -> int:
        return int(await self._call("abort", scope))

    @asynccontextmanager
    async def enter_engine(
        self, key: str, share: float, num_sequences: int
    ) -> AsyncIterator[None]:
        entry = next(self._entries)
        try:
            await self._call("enter_engine", entry, key, share, num_sequences)
            yield
        finally:
            self._channel().tell("leave_engine", entry)

    @asynccontextmanager
    async def use(self, key: ApiKey) -> AsyncIterator[None]:
        """A context that counts one request of `key`. Raises RequestRefused (429)."""
        if key.max_concurrency is None and key.requests_per_minute is None:
            yield
            return
        public = msgspec.structs.replace(key, key=None, key_sha256=None, cache_salt=None)
        call = asyncio.ensure_future(self._call("start_key", public))
        try:
            refusal = await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(lambda done: self._end_unused(done, key.name))
            raise
        if refusal is not None:
            raise msgspec.convert(refusal, type=KeyRefusal).error()
        try:
            yield
        finally:
            self._channel().tell("end_key", key.name)

    def put_response(self, response_id: str, cache_salt: str, data: bytes) -> None:
        self._channel().tell("put_response", response_id, cache_salt, data)

    async def get_response(self, response_id: str, cache_salt: str) -> bytes | None:
        found: bytes | None = await self._call("get_response", response_id, cache_salt)
        return found

    def remove_response(self, response_id: str) -> None:
        self._channel().tell("remove_response", response_id)

    def set_router_health(self, health: RouterHealth) -> None:
        self._channel().tell("router_health", health)

    def note_pause(self, *, is_paused: bool) -> None:
        self._channel().tell("paused", is_paused)

    def _end_unused(self, call: "asyncio.Future[Any]", name: str) -> None:
        """Stop counting a request that was accepted after it had been cancelled."""
        if not call.cancelled() and call.exception() is None and call.result() is None:
            self._channel().tell("end_key", name)

    async def _call(self, name: str, *values: Any) -> Any:  # noqa: ANN401 -- by call
        try:
            return await self._channel().call(name, *values)
        except ProcessGone as exc:
            raise EngineDead("the supervisor is gone") from exc
