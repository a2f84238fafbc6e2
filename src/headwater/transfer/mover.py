"""The mover: starts planned transfer jobs and reports the outcome of each job once.

Only the engine loop's thread calls it. The mover never waits for a copy. Executors put completions
into one queue, and the loop checks deadlines in each turn, so no thread polls.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headwater.cache import JobOutcome, JobStatus, Lookup, Removal, TransferJob
from headwater.errors import ConfigError, InvariantError
from headwater.storage.base import StorageStats
from headwater.transfer.completions import CompletionQueue, JobCompletion
from headwater.transfer.workers import Plan, Report, Task
from headwater.types import JobId, LinkRate, Tier

_MEMORY = 0.95
"""Factor by which each new observation reduces the weight of the earlier ones."""

_STALE_S = 60.0
"""After each period of this length without a job, the link is assumed to be twice as fast, so
that a link that was slow once is tried again."""


class LinkMeter:
    """Estimates the speed of a link: a least-squares line, seconds over blocks, through recent
    jobs."""

    def __init__(self) -> None:
        self._count = self._blocks = self._seconds = 0.0
        self._blocks_squared = self._products = 0.0
        self._last_s = 0.0

    def observe(self, num_blocks: int, busy_s: float, *, now: float) -> None:
        """Add the observation that a job of `num_blocks` took `busy_s`."""
        self._count = self._count * _MEMORY + 1
        self._blocks = self._blocks * _MEMORY + num_blocks
        self._seconds = self._seconds * _MEMORY + busy_s
        self._blocks_squared = self._blocks_squared * _MEMORY + num_blocks**2
        self._products = self._products * _MEMORY + num_blocks * busy_s
        self._last_s = now

    def rate(self, *, now: float, busy: bool = False) -> LinkRate | None:
        """The estimate; None before the first job. An old estimate is made more optimistic,
        except while the link is `busy`: then a running job will measure it."""
        if not self._blocks:
            return None
        line = self._line()
        num_stale = 0 if busy else int((now - self._last_s) / _STALE_S)
        if not num_stale:
            return line
        hope = 0.5 ** min(num_stale, 32)
        return LinkRate(line.latency_s * hope, line.block_s * hope)

    def _line(self) -> LinkRate:
        spread = self._count * self._blocks_squared - self._blocks**2
        if spread > 1e-6 * self._blocks**2:
            slope = (self._count * self._products - self._blocks * self._seconds) / spread
            start = (self._seconds - slope * self._blocks) / self._count
            if slope >= 0 and start >= 0:
                return LinkRate(start, slope)
        return LinkRate(0.0, self._seconds / self._blocks)


class DeviceCopier(Protocol):
    """Copies whole blocks between the device pool and the host slab.

    `start` returns at once. The source blocks of an offload were written by steps that are
    already collected. No step reads the targets of a load before the load has finished, so an
    implementation needs no synchronisation with compute except its own events. Only a
    `layerwise` runner reads targets earlier; it shares one event per layer with its copier. The
    copier reports each job once, from any thread, when the bytes have arrived, not when the
    copy was submitted.
    """

    def start(self, transfer: TransferJob, report: Report) -> None:
        """Start to copy `transfer.source_slots` to `transfer.target_slots`."""

    def close(self) -> None:
        """End the threads, streams and pinned memory. Calling it twice is safe."""


class StorageExecutor(Protocol):
    """Executes plans that read, write or query storage: threads, or a simulation."""

    num_parallel: int
    """Plans of one kind that it executes at once."""

    def start(self, tasks: Sequence[Task]) -> None:
        """Start all plans of one step as soon as threads are free. `report` is called once for
        each plan, when it ends."""

    def give_up(self, task: Task) -> None:
        """Do not wait for the thread that runs `task` any more: its call has passed its
        deadline."""

    def stats(self) -> StorageStats:
        """Statistics of the storage backend."""

    def close(self) -> None:
        """End without waiting for running calls. Calling it twice is safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Deadlines of jobs."""

    copy_timeout_s: float = 30.0
    """Deadline of a copy between device and host."""

    read_timeout_s: float = 10.0
    """Deadline of a read from storage."""

    write_timeout_s: float = 60.0
    """Deadline of a write to storage. No request waits for it."""

    lookup_timeout_s: float = 5.0
    """Deadline of a storage lookup."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(slots=True)
class LinkTotals:
    """Totals of one link, and its jobs in flight."""

    num_jobs: int = 0
    """Jobs that ended, successfully or not."""

    num_blocks: int = 0
    busy_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    """Jobs that failed, by reason."""

    fastest_blocks_s: float = 0.0
    """Blocks per second of the fastest job."""

    in_flight: int = 0
    """Jobs whose executor has not ended, including those that have timed out."""

    blocks_in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Running:
    """A job that has not ended."""

    plan: Plan
    deadline_s: float
    task: Task | None = None
    timed_out: bool = False


class Mover:
    """Gives each job a deadline and reports exactly one outcome; after TIMED_OUT also QUIET.

    Without a copier or workers the engine has no host tier or no storage, and no plan may need
    it.
    """

    def __init__(
        self,
        copier: DeviceCopier | None = None,
        workers: StorageExecutor | None = None,
        config: TransferConfig | None = None,
        *,
        block_bytes: int = 0,
    ) -> None:
        self._copier = copier
        self._workers = workers
        self._config = config or TransferConfig()
        self.block_bytes = block_bytes
        self.before_start: Callable[[Sequence[Plan]], None] | None = None
        """Called with plans before any of their bytes change."""
        self.completions = CompletionQueue()
        self._timeouts_s = {
            "lookup": self._config.lookup_timeout_s,
            "storage_to_host": self._config.read_timeout_s,
            "host_to_storage": self._config.write_timeout_s,
        }
        self._running: dict[JobId, _Running] = {}
        self._deadlines: list[tuple[float, JobId]] = []
        """A heap of deadlines. Those of jobs that have ended are skipped when they are due."""
        self.links: dict[str, LinkTotals] = {}
        """Totals of each link, for reading."""
        self._meters: dict[str, LinkMeter] = {}
        self.num_observed = 0
        """Number of transfers from which rates were learned. Otherwise rates change only with
        their age."""

    @property
    def copier(self) -> DeviceCopier | None:
        """Copies between device and host; None without a host tier."""
        return self._copier

    @property
    def workers(self) -> StorageExecutor | None:
        """Calls storage; None without storage."""
        return self._workers

    @property
    def num_in_flight(self) -> int:
        """Jobs whose executor may still be working."""
        return len(self._running)

    @property
    def has_storage(self) -> bool:
        return self._workers is not None

    @property
    def wake_s(self) -> float | None:
        """The next deadline, as a time of the clock."""
        self._skip_ended()
        return self._deadlines[0][0] if self._deadlines else None

    def start(self, plans: Iterable[Plan], *, now: float) -> None:
        """Start each plan. Does not wait."""
        if self.before_start is not None:
            plans = list(plans)
            self.before_start(plans)
        tasks: list[Task] = []
        for plan in plans:
            link = link_of(plan)
            timeout_s = self._timeouts_s.get(link, self._config.copy_timeout_s)
            running = _Running(plan, now + timeout_s)
            self._running[plan.job] = running
            heapq.heappush(self._deadlines, (running.deadline_s, plan.job))
            totals = self.links.get(link)
            if totals is None:
                totals = self.links[link] = LinkTotals()
            totals.in_flight += 1
            totals.blocks_in_flight += plan.num_blocks
            if not isinstance(plan, TransferJob) or Tier.STORAGE in (plan.source, plan.target):
                running.task = Task(plan, self.completions.put, running.deadline_s)
                tasks.append(running.task)
            elif self._copier is None:
                raise InvariantError("a plan needs a host tier, but the engine has none")
            else:
                self._copier.start(plan, self.completions.put)
        if tasks:
            if self._workers is None:
                raise InvariantError("a plan needs storage, but the engine has none")
            self._workers.start(tasks)

    def take(self, *, now: float) -> list[JobOutcome]:
        """The outcomes since the last call, including jobs whose deadline has passed."""
        outcomes = []
        for completion in self.completions.take():
            outcome = self._end(completion, now)
            if outcome is not None:
                outcomes.append(outcome)
        if self._deadlines and self._deadlines[0][0] <= now:
            outcomes += self._expire(now)
        return outcomes

    def has_news(self, now: float) -> bool:
        """Whether `take` would return something."""
        if self.completions.has_any:
            return True
        wake_s = self.wake_s
        return wake_s is not None and wake_s <= now

    def rate(self, link: str, *, now: float) -> LinkRate | None:
        """The measured speed of `link`. Before its first transfer, that of the opposite
        direction."""
        totals = self.links.get(link)
        busy = totals is not None and totals.in_flight > 0
        for name in (link, "_to_".join(reversed(link.split("_to_")))):
            meter = self._meters.get(name)
            rate = None if meter is None else meter.rate(now=now, busy=busy)
            if rate is not None:
                if "storage" in link and self._workers is not None:
                    rate = rate._replace(num_parallel=self._workers.num_parallel)
                return rate
        return None

    def fastest_blocks_s(self, link: str) -> float | None:
        """Blocks per second of the fastest job on `link`; None before the first."""
        totals = self.links.get(link)
        return None if totals is None else totals.fastest_blocks_s or None

    def storage_stats(self) -> StorageStats | None:
        """Statistics of storage; None without storage."""
        return None if self._workers is None else self._workers.stats()

    def close(self) -> None:
        """End the copier after its copies, and the storage threads without waiting for running
        calls. Calling it twice is safe."""
        if self._copier is not None:
            self._copier.close()
        if self._workers is not None:
            self._workers.close()
        self.completions.close()

    def _end(self, completion: JobCompletion, now: float) -> JobOutcome | None:
        """The outcome of a completion; None if there is nothing to report."""
        running = self._running.get(completion.job)
        if running is None:
            return None
        if completion.status is JobStatus.TIMED_OUT:
            return None if running.timed_out else self._time_out(running)
        del self._running[completion.job]
        self._count_end(running, completion, now)
        if running.timed_out:
            # The job was reported as timed out before. What it brought now is not used.
            quiet = JobOutcome(job=completion.job, status=JobStatus.QUIET)
            return quiet if isinstance(running.plan, TransferJob) else None
        return JobOutcome(
            job=completion.job,
            status=completion.status,
            num_blocks=completion.num_blocks,
            found=completion.found,
        )

    def _expire(self, now: float) -> list[JobOutcome]:
        outcomes = []
        self._skip_ended()
        while self._deadlines and self._deadlines[0][0] <= now:
            running = self._running[heapq.heappop(self._deadlines)[1]]
            outcomes.append(self._time_out(running))
            if running.task is not None and running.task.claim():
                # No thread has started the task, and none will: the job is quiet at once.
                del self._running[running.plan.job]
                self._leave(running)
                if isinstance(running.plan, TransferJob):
                    outcomes.append(JobOutcome(job=running.plan.job, status=JobStatus.QUIET))
            elif running.task is not None and self._workers is not None:
                self._workers.give_up(running.task)
            self._skip_ended()
        return outcomes

    def _time_out(self, running: _Running) -> JobOutcome:
        running.timed_out = True
        self.links[link_of(running.plan)].failures["timeout"] += 1
        return JobOutcome(job=running.plan.job, status=JobStatus.TIMED_OUT)

    def _skip_ended(self) -> None:
        """Drop deadlines of jobs that have ended or timed out."""
        heap = self._deadlines
        while heap:
            running = self._running.get(heap[0][1])
            if running is not None and not running.timed_out:
                return
            heapq.heappop(heap)

    def _count_end(self, running: _Running, completion: JobCompletion, now: float) -> None:
        link = link_of(running.plan)
        totals = self._leave(running)
        totals.busy_s += completion.busy_s
        if completion.status is not JobStatus.DONE:
            if not running.timed_out:
                totals.failures[completion.reason or "error"] += 1
            return
        moved = running.plan.num_blocks
        totals.num_blocks += moved
        if completion.busy_s > 0:
            totals.fastest_blocks_s = max(totals.fastest_blocks_s, moved / completion.busy_s)
        if not isinstance(running.plan, TransferJob):
            return  # the price of a load does not depend on lookups
        self.num_observed += 1
        if link not in self._meters:
            self._meters[link] = LinkMeter()
        self._meters[link].observe(moved, completion.busy_s, now=now)

    def _leave(self, running: _Running) -> LinkTotals:
        totals = self.links[link_of(running.plan)]
        totals.num_jobs += 1
        totals.in_flight -= 1
        totals.blocks_in_flight -= running.plan.num_blocks
        return totals


def link_of(plan: Plan) -> str:
    """The name of the link that `plan` uses: `host_to_device`, `storage_to_host`, …,
    `lookup`."""
    if isinstance(plan, Lookup):
        return "lookup"
    if isinstance(plan, Removal):
        return "removal"
    return f"{plan.source.name.lower()}_to_{plan.target.name.lower()}"
