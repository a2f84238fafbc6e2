"""State that all HTTP workers of one server share, so that each can answer for all of them.

`LocalState` is the state of a server with one process, such as a test's. In `headwater serve` the
supervisor keeps the state, and each worker reaches it over its own connection (`launch.worker_state`).
"""

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from msgspec import Struct

from headwater.clock import Clock
from headwater.metrics.history import HistoryPoint, RateHistory
from headwater.metrics.recorder import RecorderSnapshot
from headwater.server.answers import RouterHealth
from headwater.server.fair_share import FairShare
from headwater.server.response_store import ResponseStore


class WorkerSnapshot(Struct, frozen=True, kw_only=True):
    """What one worker counts and runs."""

    counts: RecorderSnapshot
    owners: dict[str, str] = {}
    """The key of each live sequence; empty without named keys."""

    recent: list[tuple[str, dict[str, Any]]] = []
    """Finished sequences with their keys, newest first."""


class AbortScope(Struct, frozen=True, kw_only=True):
    """Which requests to abort."""

    names: list[str] | None = None
    """Request ids; None means every request."""

    owner: str | None = None
    """Only requests of this key; None means any key."""


class SharedState(Protocol):
    """Called by endpoints on the event loop of their worker."""

    async def snapshots(self) -> list[WorkerSnapshot]:
        """A snapshot of every worker. What a worker counted before it died is included."""

    def add_point(self, point: HistoryPoint) -> None:
        """Append to the history, which all workers read."""

    async def history(self, after_unix_s: float) -> list[HistoryPoint]:
        """The points that are newer than `after_unix_s`, oldest first."""

    async def abort(self, scope: AbortScope) -> int:
        """Abort requests on every worker; return how many were running."""

    def enter_engine(
        self, key: str, share: float, num_sequences: int
    ) -> AbstractAsyncContextManager[None]:
        """Wait until sequences of `key` may enter the engine; see `FairShare.enter`."""

    def put_response(self, response_id: str, cache_salt: str, data: bytes) -> None:
        """Store a response; see `ResponseStore`."""

    async def get_response(self, response_id: str, cache_salt: str) -> bytes | None:
        """A stored response of this tenant."""

    def remove_response(self, response_id: str) -> None:
        """Forget a stored response."""

    def set_router_health(self, health: RouterHealth) -> None:
        """Tell all workers the result of the last heartbeat to a router."""

    def note_pause(self, *, is_paused: bool) -> None:
        """Record that an operator paused or resumed the engine, so that the next engine starts
        in the same state."""


class LocalWorker(Protocol):
    """One worker's own part of the state; `Service` implements it."""

    router_health: dict[str, RouterHealth]

    def snapshot(self) -> WorkerSnapshot:
        """What this worker counts and runs."""

    async def abort_here(self, scope: AbortScope) -> int:
        """Abort requests of this worker; return how many were running."""


class LocalState:
    """The state of a server with one process."""

    def __init__(
        self, worker: LocalWorker, fair_share: FairShare, responses: ResponseStore, clock: Clock
    ) -> None:
        self._worker = worker
        self._responses = responses
        self._clock = clock
        self._history = RateHistory()
        self.add_point = self._history.add
        self.enter_engine = fair_share.enter

    async def snapshots(self) -> list[WorkerSnapshot]:
        return [self._worker.snapshot()]

    async def history(self, after_unix_s: float) -> list[HistoryPoint]:
        return self._history.after(after_unix_s)

    async def abort(self, scope: AbortScope) -> int:
        return await self._worker.abort_here(scope)

    def put_response(self, response_id: str, cache_salt: str, data: bytes) -> None:
        self._responses.put(response_id, cache_salt, data, now=self._clock.now())

    async def get_response(self, response_id: str, cache_salt: str) -> bytes | None:
        return self._responses.get(response_id, cache_salt, now=self._clock.now())

    def remove_response(self, response_id: str) -> None:
        self._responses.remove(response_id)

    def set_router_health(self, health: RouterHealth) -> None:
        self._worker.router_health[health.url] = health

    def note_pause(self, *, is_paused: bool) -> None:
        """Nothing to do: the engine of a single process is not restarted."""
