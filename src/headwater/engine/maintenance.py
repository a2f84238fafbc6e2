"""Control calls that take several turns of the loop: emptying cache tiers, and reloading weights.

**Reset.** Requests go on running. Device and host are emptied at once. Storage is emptied only
together with both; otherwise their blocks, which count as stored already, would never be
written again. Storage is emptied when every write that began before has ended. When such a
write does not end in time, the reset is refused; nothing waits for a storage call that does not
return.

**Reload.** The loop goes on, so every token of the running requests is delivered. Weights are read
only when no sequence runs, none is preempted, and no step, transfer or lookup is in flight. The
condition is checked in the same turn that reads them. A drain that takes too long changes nothing.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from headwater.cache import Job, JobOutcome, JobStatus, TieredCache
from headwater.engine.client import MEMORY, TIERS, EngineInfo, ResetReport
from headwater.errors import (
    ConfigError,
    HeadwaterError,
    ModelError,
    NotDrained,
    RequestError,
    StorageError,
)
from headwater.scheduler.scheduler import Scheduler
from headwater.transfer.mover import Mover
from headwater.types import JobId, Tier

_DRAIN_S = 5.0
"""Longest wait for writes to storage that began before the reset."""


Then = Callable[[ResetReport], None]


@dataclass(slots=True)
class _PendingReset:
    """A reset whose storage is not emptied yet."""

    report: ResetReport
    then: Then
    until_s: float
    writes: set[JobId]
    """Writes to storage that began before it and have not ended."""

    removal: JobId | None = None


class Resets:
    """Carries out resets. Called from the loop's thread."""

    def __init__(self, cache: TieredCache, mover: Mover) -> None:
        self._cache = cache
        self._mover = mover
        self._pending: list[_PendingReset] = []

    @property
    def is_idle(self) -> bool:
        return not self._pending

    @property
    def wake_s(self) -> float | None:
        """When the next reset is refused if its writes have not ended."""
        return min((p.until_s for p in self._pending if p.removal is None), default=None)

    def begin(self, tiers: Collection[str], then: Then, *, now: float) -> None:
        """Empty `tiers`, and call `then` once at the end. Raises RequestError if that is not
        possible."""
        self._check(tiers)
        report = self._empty_memory(tiers)
        if "storage" not in tiers:
            then(report)
            return
        writes = self._cache.storage_writes()
        self._pending.append(_PendingReset(report, then, now + _DRAIN_S, writes))
        self.advance(now)

    def finish_job(self, job: Job, outcome: JobOutcome, now: float) -> None:
        """A removal ended; report it to the caller of the reset."""
        for pending in self._pending:
            if pending.removal == job.job:
                self._end(pending, outcome)
                return

    def advance(self, now: float) -> None:
        """Empty storage when no earlier write is left; refuse if a write takes too long."""
        for pending in list(self._pending):
            if pending.removal is not None:
                continue
            pending.writes &= self._cache.storage_writes()
            if not pending.writes:
                plan = self._cache.plan_removal(owner=self)
                pending.removal = plan.job
                self._mover.start([plan], now=now)
            elif now >= pending.until_s:
                self._refuse(
                    pending,
                    f"{len(pending.writes)} earlier writes did not end within {_DRAIN_S:g} s",
                )

    def _end(self, pending: _PendingReset, outcome: JobOutcome) -> None:
        if outcome.status is not JobStatus.DONE:
            self._refuse(
                pending, "the removal failed or did not end in time; see the log and try again"
            )
            return
        self._pending.remove(pending)
        removed = pending.report.removed | {"storage": outcome.num_blocks}
        pending.then(replace(pending.report, removed=removed))

    def _refuse(self, pending: _PendingReset, why: str) -> None:
        self._pending.remove(pending)
        pending.then(replace(pending.report, refusal=f"storage was not emptied: {why}"))

    def _empty_memory(self, tiers: Collection[str]) -> ResetReport:
        cache = self._cache
        pools = {"device": Tier.DEVICE, "host": Tier.HOST}
        before = {name: cache.pool_stats(pools[name]).cached for name in pools if name in tiers}
        if set(tiers) >= MEMORY:
            cache.reset()
        elif "device" in tiers:
            cache.trim(0)
        else:
            cache.trim_host()
        kept = {name: cache.pool_stats(pools[name]).cached for name in before}
        return ResetReport(
            removed={name: before[name] - kept[name] for name in before}, kept=kept
        )

    def _check(self, tiers: Collection[str]) -> None:
        unknown = sorted(set(tiers) - set(TIERS))
        if unknown or not tiers:
            raise RequestError(
                f"tiers must be one or more of {', '.join(TIERS)}; got {', '.join(tiers) or 'none'}"
            )
        if "storage" not in tiers:
            return
        if not set(tiers) >= MEMORY:
            raise RequestError(
                "storage can only be emptied together with device and host, got "
                f"{', '.join(tiers)}: blocks in memory that were stored once are not written "
                f"again; name all three tiers"
            )
        if not self._mover.has_storage:
            raise RequestError(
                "this engine has no storage tier to empty; leave storage out of tiers"
            )


Reload = Callable[[str | None], EngineInfo]
"""Reads the weights of a folder, or of the current folder again, and returns the engine's new
description."""

REFUSALS = (RequestError, ModelError, ConfigError, StorageError)
"""Errors that refuse a control call. Any other error ends the engine."""


@dataclass(slots=True)
class _PendingReload:
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
        self._pending: _PendingReload | None = None
        self.read: Reload | None = None
        """Reads the weights; None if this engine cannot reload."""

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would read the weights now."""
        return self._pending is not None and self._scheduler.is_drained

    @property
    def wake_s(self) -> float | None:
        """When a pending reload fails."""
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
        """Start to drain. Later `then` gets the new description, or `fail` gets the error:
        NotDrained after `drain_s`, or the error of `read`. After an error nothing has
        changed."""
        if self.read is None:
            raise RequestError("this engine cannot reload weights; restart it instead")
        if self._pending is not None:
            raise RequestError("another reload is running; retry when it has ended")
        self._scheduler.begin_drain()
        self._pending = _PendingReload(folder, drain_s, now + drain_s, then, fail)

    def advance(self, now: float) -> None:
        """Read the weights when nothing uses the old ones any more; fail at the deadline."""
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
