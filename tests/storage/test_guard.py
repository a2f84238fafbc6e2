"""A guarded backend: failing, hanging and lying backends cost hits, not time."""

from collections.abc import Callable
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest

from headwater.clock import SystemClock, VirtualClock
from headwater.errors import (
    StorageBadAnswer,
    StorageError,
    StorageTimeout,
    StorageUnavailable,
)
from headwater.storage import BlockRead, BlockWrite, BreakerConfig, GuardedStorage
from headwater.storage.guard import MAX_LOST_PROBES
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.testing.faults import Fault, FaultyStorage
from headwater.testing.storage import make_format, make_keys, read_run, write_run

BLOCK_BYTES = 64
CONFIG = BreakerConfig(max_failures=3, recovery_s=5.0, max_recovery_s=12.0)
KEYS = make_keys(2)
CALLS: dict[str, Callable[[GuardedStorage], object]] = {
    "contains": lambda guarded: guarded.contains([KEYS], timeout_s=1),
    "read": lambda guarded: read_run(guarded, KEYS, BLOCK_BYTES),
    "write": lambda guarded: write_run(guarded, KEYS, BLOCK_BYTES),
    "remove": lambda guarded: guarded.remove(None, timeout_s=1),
}


def make_memory() -> MemoryStorage:
    return MemoryStorage(MemoryConfig(), make_format(block_bytes=BLOCK_BYTES))


class Probes:
    """Keeps probes until the test runs them."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for work in waiting:
            work()


def make_guarded(
    script: dict[str, list[Fault | None]],
) -> tuple[GuardedStorage, Probes, VirtualClock]:
    clock, probes = VirtualClock(), Probes()
    backend = FaultyStorage(make_memory(), script)
    return GuardedStorage(backend, CONFIG, clock, spawn=probes), probes, clock


def test_an_open_breaker_answers_at_once() -> None:
    """The backend is not called, and a refusal is distinguished from a miss (lesson 45)."""
    guarded, _, _ = make_guarded({"read": [Fault.ERROR, Fault.TIMEOUT, Fault.ERROR]})
    write_run(guarded, KEYS, BLOCK_BYTES)
    for error in (StorageError, StorageTimeout, StorageError):
        with pytest.raises(error):
            read_run(guarded, KEYS, BLOCK_BYTES)

    for call in (
        lambda: guarded.contains([KEYS], timeout_s=1),
        lambda: read_run(guarded, KEYS, BLOCK_BYTES),
    ):
        with pytest.raises(StorageUnavailable):
            call()
    stats = guarded.stats()
    assert stats.reasons == {"error": 2, "timeout": 1, "breaker_open": 2}
    assert (stats.breaker, stats.write_breaker, stats.recoveries) == ("open", "closed", 0)


def test_failing_writes_leave_reads_alone() -> None:
    """A read-only store still serves its blocks; a later write tests whether writes work
    again."""
    guarded, _, clock = make_guarded({"write": [None, Fault.ERROR, Fault.ERROR, Fault.ERROR]})
    write_run(guarded, KEYS, BLOCK_BYTES)
    new = make_keys(1, run="new")
    for _ in range(3):
        with pytest.raises(StorageError):
            write_run(guarded, new, BLOCK_BYTES)

    with pytest.raises(StorageUnavailable):
        write_run(guarded, new, BLOCK_BYTES)
    assert read_run(guarded, KEYS, BLOCK_BYTES) == [BlockRead.READ] * 2
    assert (guarded.stats().breaker, guarded.stats().write_breaker) == ("closed", "open")

    clock.advance(5.0)
    assert write_run(guarded, new, BLOCK_BYTES) == [BlockWrite.WRITTEN]
    assert guarded.stats().write_breaker == "closed"


def test_no_request_pays_for_the_trial_of_reads() -> None:
    """The call that finds the trial due is refused at once; a probe repeats what failed."""
    guarded, probes, clock = make_guarded({"read": [Fault.ERROR] * 4})
    write_run(guarded, KEYS, BLOCK_BYTES)
    for _ in range(3):
        with pytest.raises(StorageError):
            read_run(guarded, KEYS, BLOCK_BYTES)

    for wait_s, state in ((5.0, "open"), (10.0, "closed")):  # the fourth read fails too
        clock.advance(wait_s)
        for _ in range(3):
            with pytest.raises(StorageUnavailable):
                read_run(guarded, KEYS, BLOCK_BYTES)
        assert len(probes.waiting) == 1
        probes.run()
        assert guarded.stats().breaker == state
    assert read_run(guarded, KEYS, BLOCK_BYTES) == [BlockRead.READ] * 2
    assert guarded.stats().recoveries == 1


class Hanging(MemoryStorage):
    """Calls of one name never return, until the test ends them."""

    def __init__(self, name: str) -> None:
        super().__init__(MemoryConfig(), make_format(block_bytes=BLOCK_BYTES))
        self.gate = Event()
        self.num_hung = 0
        setattr(self, name, self._hang)

    def _hang(self, *_: object, **__: object) -> Any:
        self.num_hung += 1
        self.gate.wait()
        raise StorageError("it hung")


def call_in_thread(call: Callable[[], object]) -> None:
    def run() -> None:
        with pytest.raises(StorageError):
            call()

    Thread(target=run, daemon=True).start()


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_never_end_open_the_breaker(name: str) -> None:
    """Lessons 75, 76: the breaker counts calls that are past their deadline, though they have
    not returned. Later calls are refused at once."""
    clock, backend = VirtualClock(), Hanging(name)
    guarded = GuardedStorage(backend, CONFIG, clock, spawn=Probes())
    for count in range(1, 4):
        call_in_thread(partial(CALLS[name], guarded))
        while backend.num_hung < count:
            pass
    clock.advance(60.0)

    stats = guarded.stats()
    assert "open" in (stats.breaker, stats.write_breaker)
    with pytest.raises(StorageUnavailable):
        CALLS[name](guarded)
    assert guarded.stats().reasons["hung"] == 3
    backend.gate.set()


@pytest.mark.parametrize("gives_up", [True, False])
def test_successful_calls_do_not_cancel_out_calls_that_still_hang(gives_up: bool) -> None:
    """A store may answer some lookups from memory and hang in others. The third that hangs
    opens the breaker, whether the backend raises StorageTimeout or does not return at all."""
    clock, memory = VirtualClock(), make_memory()
    guarded = GuardedStorage(memory, CONFIG, clock, spawn=Probes())
    answer, num_hung, gate = memory.contains, [0], Event()

    def hang(runs: object, *, timeout_s: float) -> list[int]:
        num_hung[0] += 1
        if gives_up:
            raise StorageTimeout("no answer", quiet=gate)
        gate.wait()
        raise StorageError("it hung")

    for count in range(1, 4):
        memory.contains = hang  # type: ignore[method-assign]
        call_in_thread(lambda: guarded.contains([KEYS], timeout_s=1))
        while num_hung[0] < count:
            pass
        clock.advance(10.0)
        guarded.stats()
        if count < 3:
            memory.contains = answer  # type: ignore[method-assign]
            guarded.contains([KEYS], timeout_s=1)

    end_s = SystemClock().now() + 20.0
    while guarded.stats().breaker != "open":
        assert SystemClock().now() < end_s, "three calls hang, and the breaker is closed"
    gate.set()


def test_hung_probes_are_bounded_and_reopen_the_breaker() -> None:
    """A store that hangs for ever costs a bounded number of threads, and no request any time."""
    clock, backend = VirtualClock(), Hanging("contains")
    guarded = GuardedStorage(backend, CONFIG, clock)
    for count in range(1, 4):
        call_in_thread(lambda: guarded.contains([KEYS], timeout_s=1))
        while backend.num_hung < count:
            pass

    for _ in range(50):
        clock.advance(60.0)
        with pytest.raises(StorageUnavailable):
            guarded.contains([KEYS], timeout_s=1)
    while backend.num_hung < 3 + MAX_LOST_PROBES:
        pass
    assert backend.num_hung == 3 + MAX_LOST_PROBES
    clock.advance(60.0)
    with pytest.raises(StorageUnavailable):
        guarded.contains([KEYS], timeout_s=1)
    assert guarded.stats().threads_lost == MAX_LOST_PROBES
    backend.gate.set()


def test_a_call_that_returns_after_its_deadline_does_not_close_the_breaker() -> None:
    """The late call was counted as failed; its late success says nothing about the next
    call."""
    clock, memory = VirtualClock(), make_memory()
    guarded = GuardedStorage(memory, BreakerConfig(max_failures=1), clock, spawn=Probes())

    def slow(runs: object, *, timeout_s: float) -> list[int]:
        clock.advance(60.0)
        guarded.stats()
        return [0]

    memory.contains = slow  # type: ignore[method-assign]
    assert guarded.contains([KEYS], timeout_s=1) == [0]
    assert guarded.stats().breaker == "open"


class OwnError(Exception):
    """An exception class of a plug-in."""


WRONG: dict[str, list[Any]] = {
    "contains": [[-1], [1.5], ["3"], [None], [3], [True], [], [1, 1], None, 7, "1", object()],
    "read": [[], [BlockRead.READ], [BlockRead.READ] * 3, [True, True], ["read"] * 2, None],
    "write": [[], [BlockWrite.WRITTEN], [BlockRead.READ] * 2, [0, 0], None, object()],
    "remove": [-1, 1.5, "3", None, [1], True],
}


@pytest.mark.parametrize(
    ("name", "answer"), [(name, answer) for name, many in WRONG.items() for answer in many]
)
def test_a_wrong_answer_is_a_counted_failure(name: str, answer: object) -> None:
    """Whatever a plug-in returns, its caller gets a StorageError, and the reason is counted."""
    memory = make_memory()
    setattr(memory, name, lambda *_, **__: answer)
    guarded = GuardedStorage(memory, CONFIG, SystemClock())

    with pytest.raises(StorageBadAnswer, match=f"{name} answered"):
        CALLS[name](guarded)
    assert guarded.stats().reasons == {"bad_answer": 1}


@pytest.mark.parametrize("name", CALLS)
def test_an_exception_of_a_plug_in_is_a_counted_failure(name: str) -> None:
    """The exception's class is the plug-in's own; the caller gets a StorageError."""
    memory = make_memory()

    def fail(*_: object, **__: object) -> None:
        raise OwnError("mine")

    setattr(memory, name, fail)
    guarded = GuardedStorage(memory, CONFIG, SystemClock())

    with pytest.raises(StorageError, match="raised OwnError: mine"):
        CALLS[name](guarded)
    assert guarded.stats().reasons == {"exception": 1}


@pytest.mark.parametrize("answer", [None, 3, OwnError("mine")])
def test_wrong_statistics_are_counted_and_the_last_good_ones_kept(answer: object) -> None:
    """`stats` is read on the engine loop, so it never raises there."""
    memory = make_memory()
    guarded = GuardedStorage(memory, CONFIG, SystemClock())
    write_run(guarded, KEYS, BLOCK_BYTES)

    def stats() -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    memory.stats = stats  # type: ignore[method-assign, assignment]
    write_run(guarded, make_keys(1, run="more"), BLOCK_BYTES)

    assert guarded.stats().blocks_written == 2
    assert sum(guarded.stats().reasons.values()) == 1


@pytest.mark.parametrize("hangs", [True, False])
def test_closing_never_raises_and_never_hangs(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plug-in's `close` may raise or hang; shutting down continues."""
    monkeypatch.setattr("headwater.storage.guard._CLOSE_TIMEOUT_S", 0.05)
    memory, gate = make_memory(), Event()

    def close() -> None:
        if hangs:
            gate.wait()
        raise OwnError("mine")

    memory.close = close  # type: ignore[method-assign]
    guarded = GuardedStorage(memory, CONFIG, SystemClock())
    guarded.close()
    guarded.close()
    gate.set()


def test_damaged_and_absent_blocks_do_not_open_it() -> None:
    """A miss is an answer: only calls that fail count."""
    guarded, _, _ = make_guarded({})

    for _ in range(10):
        read_run(guarded, make_keys(1), BLOCK_BYTES)

    assert guarded.stats().breaker == "closed"


def test_full_storage_opens_the_write_breaker_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lesson 89: a store without room is not sent every block; stored blocks are still read, and
    each change has a log line."""
    refusals = [None, *[Fault.REFUSED] * CONFIG.max_failures]
    guarded, _, clock = make_guarded({"write": refusals})
    with caplog.at_level("INFO", logger="headwater.storage"):
        write_run(guarded, KEYS, BLOCK_BYTES)
        for _ in range(CONFIG.max_failures):
            assert set(write_run(guarded, KEYS, BLOCK_BYTES)) == {BlockWrite.REFUSED}

        assert guarded.stats().write_breaker == "open"
        assert guarded.stats().breaker == "closed"
        assert set(read_run(guarded, KEYS, BLOCK_BYTES)) == {BlockRead.READ}

        clock.advance(CONFIG.max_recovery_s)
        write_run(guarded, KEYS, BLOCK_BYTES)

    logged = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in logged] == [
        "storage is full and refuses writes; stored blocks are still read",
        "storage breaker opened",
        "storage breaker closed, storage answers again",
    ]
    assert "calls=writes reason=full" in logged[1]
