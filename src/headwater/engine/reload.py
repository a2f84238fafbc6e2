"""Reads other weights while the engine lives, when nothing uses the old ones any more.

The loop goes on meanwhile, so every token of the running requests is delivered. Weights are read
only when no sequence runs, none is preempted, and no step, transfer or lookup is in flight. The
condition is checked in the same turn that reads them. A drain that takes too long changes
nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headwater.engine.client import EngineInfo
from headwater.errors import (
    ConfigError,
    HeadwaterError,
    ModelError,
    NotDrained,
    RequestError,
    StorageError,
)
from headwater.scheduler.scheduler import Scheduler

Reload = Callable[[str | None], EngineInfo]
"""Reads weights of a folder, or of the current folder again; the engine's new description."""

REFUSALS = (RequestError, ModelError, ConfigError, StorageError)
"""Errors that refuse a control call. Any other error ends the engine."""


@dataclass(slots=True)
class _Pending:
    """A reload that waits for running sequences and transfers."""

    folder: str | None
    drain_s: float
    until_s: float
    then: Callable[[EngineInfo], None]
    fail: Callable[[HeadwaterError], None]


class WeightReload:
    """At most one reload at a time. Called from the loop's thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pending: _Pending | None = None
        self.read: Reload | None = None
        """Reads the weights; None where this engine cannot."""

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would read the weights now."""
        return self._pending is not None and self._scheduler.is_drained

    @property
    def wake_s(self) -> float | None:
        """When a pending reload is given up."""
        return None if self._pending is None else self._pending.until_s

    def begin(
        self,
        folder: str | None,
        drain_s: float,
        then: Callable[[EngineInfo], None],
        fail: Callable[[HeadwaterError], None],
        *,
        now: float,
    ) -> None:
        """Start to drain. Later `then` gets the new description, or `fail` the error: NotDrained
        after `drain_s`, or what `read` raised; then nothing has changed."""
        if self.read is None:
            raise RequestError("this engine cannot reload weights; restart it instead")
        if self._pending is not None:
            raise RequestError("another reload is running; retry when it has ended")
        self._scheduler.begin_drain()
        self._pending = _Pending(folder, drain_s, now + drain_s, then, fail)

    def advance(self, now: float) -> None:
        """Read the weights if nothing uses the old ones any more; give up at the deadline."""
        pending = self._pending
        if pending is None or self.read is None:
            return
        if self._scheduler.is_drained:
            self._end()
            try:
                info = self.read(pending.folder)
            except REFUSALS as exc:
                pending.fail(exc)
            else:
                pending.then(info)
        elif now >= pending.until_s:
            self._end()
            pending.fail(NotDrained(self._describe(pending.drain_s)))

    def _end(self) -> None:
        self._pending = None
        self._scheduler.end_drain()

    def _describe(self, drain_s: float) -> str:
        stats = self._scheduler.stats()
        return (
            f"{stats.num_running} running and {self._scheduler.num_preempted} preempted requests "
            f"and {stats.num_copies} transfers had not ended after {drain_s:g} s; nothing was "
            "changed. Retry with a longer drain_timeout_s"
        )
