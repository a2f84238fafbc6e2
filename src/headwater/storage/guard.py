"""Puts a backend behind two circuit breakers: a store that fails or hangs costs hits, not time.

Reads (`contains`, `read`) and writes (`write`, `remove`) have a breaker each, because a store
may refuse one and serve the other. A call that has not ended by its deadline counts as failed
when the next call begins; its late end is ignored. A store may answer some calls and hang in
others, so a successful call does not reset the count of calls that still hang. While a breaker
is open its calls raise StorageUnavailable at once.

Requests wait for reads, so no request is used to test whether reads work again: a probe in a
separate thread repeats a call that failed. No request waits for a write, so the trial of the
write breaker is an ordinary write.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import TypeVar

from headwater.clock import Clock
from headwater.errors import (
    StorageBadAnswer,
    StorageCorrupt,
    StorageError,
    StorageTimeout,
    StorageUnavailable,
)
from headwater.storage.base import BlockRead, BlockWrite, StorageBackend, StorageStats
from headwater.storage.breaker import Breaker, BreakerConfig, BreakerState
from headwater.storage.calls import check_count, check_counts, check_outcomes, check_stats
from headwater.types import BlockKey

T = TypeVar("T")
Spawn = Callable[[Callable[[], None]], None]
"""Runs a function in another thread, without waiting for it."""

log = logging.getLogger(__name__)

MAX_LOST_PROBES = 4
"""Probe threads that may hang at once. No further probe starts until one of them returns."""

_GRACE_S = 0.2
"""A backend with its own deadlines raises StorageTimeout within this time after a deadline."""

_PROBE_TIMEOUT_S = 5.0
_PROBE_BLOCKS = 4
_CLOSE_TIMEOUT_S = 10.0


def _start_thread(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread, which never keeps the process from exiting."""
    Thread(target=work, name="storage-probe", daemon=True).start()


@dataclass(slots=True, eq=False)
class _Call:
    """A call that has not ended."""

    kind: str
    overdue_s: float
    breaker: Breaker
    probe: Callable[[], object] | None
    """Repeats a read call, with separate memory."""

    ended: Event = field(default_factory=Event)


class GuardedStorage:
    """A `StorageBackend` that raises only StorageError, returns only checked values, and
    refuses calls while the backend fails."""

    def __init__(
        self,
        backend: StorageBackend,
        config: BreakerConfig,
        clock: Clock,
        *,
        spawn: Spawn = _start_thread,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._spawn = spawn
        self._reads = Breaker(config, clock, "reads")
        self._writes = Breaker(config, clock, "writes")
        self._lock = Lock()
        self._reasons: Counter[str] = Counter()
        self._running: dict[int, _Call] = {}
        """Calls that have not ended and are not overdue."""
        self._hung: dict[str, list[Event]] = {}
        """Calls that have passed their deadline, by kind; an event is set when its call ends."""
        self._num_calls = 0
        self._num_probing = 0
        self._probe: Callable[[], object] = lambda: None
        """Repeats the last failed read call."""
        self._closing = False
        self._was_full = False
        """Whether the last write was refused for lack of room; only for the log."""
        self._stats = (0, check_stats(backend.stats()))
        """The newest snapshot, with the number of the call it was taken after."""

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        def ask(keys: Sequence[Sequence[BlockKey]], timeout_s: float) -> list[int]:
            return check_counts(self._backend.contains(keys, timeout_s=timeout_s), keys)

        few = [run[:_PROBE_BLOCKS] for run in runs[:1]]
        return self._read_call(
            "contains",
            lambda: ask(runs, timeout_s),
            lambda: ask(few, _PROBE_TIMEOUT_S),
            timeout_s,
        )

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        def ask(
            keys: Sequence[BlockKey], into: Sequence[memoryview], timeout_s: float
        ) -> list[BlockRead]:
            answer = self._backend.read(keys, into, timeout_s=timeout_s)
            return check_outcomes(answer, BlockRead, len(keys), "read")

        few, sizes = list(keys[:_PROBE_BLOCKS]), [view.nbytes for view in into[:_PROBE_BLOCKS]]

        def probe() -> object:
            scratch = [memoryview(bytearray(size)) for size in sizes]
            return ask(few, scratch, _PROBE_TIMEOUT_S)

        return self._read_call("read", lambda: ask(keys, into, timeout_s), probe, timeout_s)

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        def ask() -> list[BlockWrite]:
            answer = self._backend.write(keys, blocks, parents=parents, timeout_s=timeout_s)
            return check_outcomes(answer, BlockWrite, len(keys), "write")

        return self._write_call("write", ask, timeout_s, is_refused=_are_all_refused)

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        def ask() -> int:
            return check_count(self._backend.remove(keys, timeout_s=timeout_s), "remove")

        return self._write_call("remove", ask, timeout_s)

    def stats(self) -> StorageStats:
        """The backend's statistics after its last call, with the states of the breakers and the
        counts of this object. Never calls the backend, whose `stats` may hang."""
        self._expire_calls()
        stats = self._stats[1]
        with self._lock:
            reasons = Counter(stats.reasons) + self._reasons
            lost_probes = self._num_probing - (self._reads.state is BreakerState.HALF_OPEN)
        return dataclasses.replace(
            stats,
            reasons=dict(reasons),
            breaker=self._reads.state.value,
            write_breaker=self._writes.state.value,
            recoveries=self._reads.num_recoveries + self._writes.num_recoveries,
            threads_lost=stats.threads_lost + max(lost_probes, 0),
        )

    def close(self) -> None:
        """Close the backend, and wait for it at most ten seconds."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            thread = Thread(target=self._close_backend, name="storage-close", daemon=True)
            thread.start()
            thread.join(_CLOSE_TIMEOUT_S)
            if thread.is_alive():
                log.warning("storage backend does not close: waited_s=%g", _CLOSE_TIMEOUT_S)

    def _read_call(
        self, kind: str, call: Callable[[], T], probe: Callable[[], object], timeout_s: float
    ) -> T:
        self._expire_calls()
        if self._reads.state is not BreakerState.CLOSED:
            self._start_probe()
            raise self._refusal()
        return self._call(kind, call, self._reads, timeout_s, probe)

    def _write_call(
        self,
        kind: str,
        call: Callable[[], T],
        timeout_s: float,
        *,
        is_refused: Callable[[T], bool] = lambda answer: False,
    ) -> T:
        self._expire_calls()
        if not self._writes.admits(timeout_s):
            raise self._refusal()
        return self._call(kind, call, self._writes, timeout_s, is_refused=is_refused)

    def _refusal(self) -> StorageUnavailable:
        self._count("breaker_open")
        return StorageUnavailable("storage failed repeatedly and is not called for now")

    def _call(
        self,
        kind: str,
        call: Callable[[], T],
        breaker: Breaker,
        timeout_s: float,
        probe: Callable[[], object] | None = None,
        *,
        is_refused: Callable[[T], bool] = lambda answer: False,
    ) -> T:
        overdue_s = self._clock.now() + timeout_s + _GRACE_S
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
            record = self._running[number] = _Call(kind, overdue_s, breaker, probe)
        try:
            answer = call()
        except Exception as error:
            record.ended.set()
            self._end_call(number, error)
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"storage backend raised {type(error).__name__}: {error}"
            ) from error
        record.ended.set()
        self._end_call(number, None, was_refused=is_refused(answer))
        return answer

    def _end_call(
        self, number: int, error: Exception | None, *, was_refused: bool = False
    ) -> None:
        self._take_stats()
        with self._lock:
            call = self._running.pop(number, None)
        if error is not None:
            self._count(_reason(error))
        if call is None:
            return
        if was_refused:
            self._fail(call, "full")
        elif error is None:
            self._was_full = self._was_full and call.breaker is not self._writes
            call.breaker.succeed(call.kind, num_hung=self._num_hung(call.kind))
        else:
            if isinstance(error, StorageTimeout) and error.quiet is not None:
                self._num_hung(call.kind, error.quiet)
            self._fail(call, _reason(error))

    def _expire_calls(self) -> None:
        """Count calls that have not ended by their deadline as failed."""
        now = self._clock.now()
        with self._lock:
            overdue = [n for n, call in self._running.items() if call.overdue_s <= now]
            calls = [self._running.pop(number) for number in overdue]
            self._reasons["hung"] += len(calls)
        for call in calls:
            self._num_hung(call.kind, call.ended)
            self._fail(call, "hung")

    def _num_hung(self, kind: str, *added: Event) -> int:
        """Calls of `kind` that passed their deadline and still run, those `added` included."""
        with self._lock:
            hung = [e for e in (*self._hung.get(kind, ()), *added) if not e.is_set()]
            self._hung[kind] = hung
        return len(hung)

    def _fail(self, call: _Call, reason: str) -> None:
        self._probe = call.probe or self._probe
        if reason == "full" and not self._was_full:
            self._was_full = True
            stats = self._stats[1]
            log.warning(
                "storage is full and refuses writes; stored blocks are still read: backend=%s "
                "used_bytes=%s capacity_bytes=%s reasons=%s",
                *(stats.backend, stats.used_bytes, stats.capacity_bytes, dict(stats.reasons)),
            )
        call.breaker.fail(call.kind, reason)

    def _start_probe(self) -> None:
        with self._lock:
            if self._num_probing >= MAX_LOST_PROBES or self._closing:
                return
            if not self._reads.begin_trial(_PROBE_TIMEOUT_S):
                return
            self._num_probing += 1
        self._spawn(self._run_probe)

    def _run_probe(self) -> None:
        try:
            self._call("probe", self._probe, self._reads, _PROBE_TIMEOUT_S)
        except StorageError as error:
            log.info("storage probe failed: error=%s", error)
        finally:
            with self._lock:
                self._num_probing -= 1

    def _take_stats(self) -> None:
        """Store the backend's statistics. Called in the thread of the call that just ended."""
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
        try:
            stats = check_stats(self._backend.stats())
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            self._count(_reason(error))
            return
        with self._lock:
            if number > self._stats[0]:
                self._stats = (number, stats)

    def _close_backend(self) -> None:
        try:
            self._backend.close()
        except Exception:
            log.exception("storage backend raised while closing")

    def _count(self, reason: str) -> None:
        with self._lock:
            self._reasons[reason] += 1


def _are_all_refused(outcomes: list[BlockWrite]) -> bool:
    """Whether nothing was stored. Further writes would copy bytes in vain."""
    return bool(outcomes) and all(outcome is BlockWrite.REFUSED for outcome in outcomes)


def _reason(error: Exception) -> str:
    if isinstance(error, StorageTimeout):
        return "timeout"
    if isinstance(error, StorageBadAnswer):
        return "bad_answer"
    if isinstance(error, StorageCorrupt):
        return error.reason
    return "error" if isinstance(error, StorageError) else "exception"
