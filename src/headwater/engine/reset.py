"""Forgetting what is cached, tier by tier, while requests run.

Memory is forgotten at once. Storage is forgotten together with memory only, because what is in
memory is known to be stored, and would never be written again. It is asked to forget when every
write that began before has ended, or the reset is refused: nobody waits for a worker that
does not answer.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from headwater.cache import JobOutcome, JobStatus, Removal, TieredCache
from headwater.engine.client import MEMORY, TIERS, ResetReport
from headwater.errors import RequestError
from headwater.transfer.mover import Mover
from headwater.types import JobId

_DRAIN_S = 5.0
"""Longest wait for writes to storage that began before."""


Then = Callable[[ResetReport], None]


@dataclass(slots=True)
class _Pending:
    """A reset whose storage is not forgotten yet."""

    report: ResetReport
    then: Then
    until_s: float
    writes: set[JobId]
    """Begun before, and not ended."""

    removal: JobId | None = None


class Resets:
    """Carries out resets; called from the loop's thread."""

    def __init__(self, cache: TieredCache, mover: Mover) -> None:
        self._cache = cache
        self._mover = mover
        self._pending: list[_Pending] = []

    @property
    def is_idle(self) -> bool:
        return not self._pending

    @property
    def wake_s(self) -> float | None:
        """When a reset has to be refused, if nothing happens before."""
        return min((p.until_s for p in self._pending if p.removal is None), default=None)

    def begin(self, tiers: Collection[str], then: Then, *, now: float) -> None:
        """Forget `tiers`, and tell `then`, once, at the end; RequestError where that cannot be."""
        self._check(tiers)
        report = self._forget_memory(tiers)
        if "storage" not in tiers:
            then(report)
            return
        writes = self._mover.jobs_on("host_to_storage")
        self._pending.append(_Pending(report, then, now + _DRAIN_S, writes))
        self.advance(now)

    def lands(self, outcome: JobOutcome) -> bool:
        """Whether `outcome` is of a removal; whoever waits for it is told."""
        for pending in self._pending:
            if pending.removal == outcome.job:
                self._end(pending, outcome)
                return True
        for pending in self._pending:
            if outcome.ending is not JobStatus.TIMED_OUT:
                pending.writes.discard(outcome.job)
        return False

    def advance(self, now: float) -> None:
        """Ask storage to forget, where no write is left; refuse where one takes too long."""
        for pending in list(self._pending):
            if pending.removal is not None:
                continue
            if not pending.writes:
                plan = Removal(job=self._cache.transfers.jobs.new_id())
                pending.removal = plan.job
                self._mover.start([plan], now=now)
            elif now >= pending.until_s:
                self._refuse(pending, f"{len(pending.writes)} writes to it do not end")

    def _end(self, pending: _Pending, outcome: JobOutcome) -> None:
        if outcome.ending is not JobStatus.DONE:
            self._refuse(pending, "it failed, or did not answer in time")
            return
        self._pending.remove(pending)
        removed = pending.report.removed | {"storage": outcome.num_blocks}
        pending.then(replace(pending.report, removed=removed))

    def _refuse(self, pending: _Pending, why: str) -> None:
        self._pending.remove(pending)
        pending.then(replace(pending.report, refusal=f"storage was not forgotten: {why}"))

    def _forget_memory(self, tiers: Collection[str]) -> ResetReport:
        cache = self._cache
        pools = {"device": cache.device.pool, "host": cache.host.pool}
        before = {name: pools[name].stats().cached for name in pools if name in tiers}
        if set(tiers) >= MEMORY:
            cache.reset()
        elif "device" in tiers:
            cache.trim(0)
        else:
            cache.trim_host()
        kept = {name: pools[name].stats().cached for name in before}
        return ResetReport(
            removed={name: before[name] - kept[name] for name in before}, kept=kept
        )

    def _check(self, tiers: Collection[str]) -> None:
        unknown = sorted(set(tiers) - set(TIERS))
        if unknown or not tiers:
            raise RequestError(f"tiers are {', '.join(TIERS)}; got {unknown or 'none'}")
        if "storage" not in tiers:
            return
        if not set(tiers) >= MEMORY:
            raise RequestError(
                "storage is forgotten together with device and host only: what they have is "
                "known to be stored, and would not be written again"
            )
        if not self._mover.has_storage:
            raise RequestError("there is no storage to forget")
