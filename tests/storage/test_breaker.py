"""The circuit breaker: a dead store costs hits, not time, and comes back by itself."""

import pytest

from headwater.clock import VirtualClock
from headwater.errors import ConfigError, StorageError, StorageResting, StorageTimeout
from headwater.storage import BlockRead, Breaker, BreakerConfig, GuardedStorage
from headwater.storage.breaker import BreakerState
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.testing.faults import Fault, FaultyStorage
from headwater.testing.storage import make_format, make_keys, read_run, write_run

BLOCK_BYTES = 64
CONFIG = BreakerConfig(max_failures=3, recovery_s=5.0, max_recovery_s=12.0)


def make_guarded(
    script: dict[str, list[Fault | None]],
) -> tuple[GuardedStorage, Breaker, VirtualClock]:
    clock = VirtualClock()
    breaker = Breaker(CONFIG, clock)
    memory = MemoryStorage(MemoryConfig(), make_format(block_bytes=BLOCK_BYTES))
    return GuardedStorage(FaultyStorage(memory, script), breaker), breaker, clock


def state_of(breaker: Breaker) -> BreakerState:
    return breaker.state


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert breaker.admits()
        breaker.failed()


def test_failures_in_a_row_open_it() -> None:
    """One failure less does not, and a success starts the count anew."""
    breaker = Breaker(CONFIG, VirtualClock())

    fail(breaker, 2)
    assert state_of(breaker) is BreakerState.CLOSED
    breaker.succeeded()
    fail(breaker, 3)
    assert state_of(breaker) is BreakerState.OPEN
    assert not breaker.admits()


def test_one_call_tries_whether_it_is_back() -> None:
    """Only one, however many ask; its success closes the breaker for all."""
    clock = VirtualClock()
    breaker = Breaker(CONFIG, clock)
    fail(breaker, 3)

    clock.advance(4.9)
    assert not breaker.admits()
    clock.advance(0.1)
    assert [breaker.admits() for _ in range(3)] == [True, False, False]
    assert state_of(breaker) is BreakerState.HALF_OPEN
    breaker.succeeded()
    assert state_of(breaker) is BreakerState.CLOSED


def test_each_failed_try_doubles_the_wait_up_to_a_bound() -> None:
    """5, 10, 12, 12 seconds; after a success 5 again."""
    clock = VirtualClock()
    breaker = Breaker(CONFIG, clock)
    fail(breaker, 3)

    for wait_s in (5.0, 10.0, 12.0, 12.0):
        clock.advance(wait_s - 0.1)
        assert not breaker.admits()
        clock.advance(0.1)
        fail(breaker, 1)
    clock.advance(12.0)
    assert breaker.admits()
    breaker.succeeded()
    fail(breaker, 3)
    clock.advance(5.0)
    assert breaker.admits()


def test_an_open_breaker_answers_at_once() -> None:
    """The backend is not asked, and what is refused is told apart from a miss (lesson 45)."""
    guarded, breaker, clock = make_guarded({"read": [Fault.ERROR, Fault.TIMEOUT, Fault.ERROR]})
    keys = make_keys(2)
    write_run(guarded, keys, BLOCK_BYTES)
    for error in (StorageError, StorageTimeout, StorageError):
        with pytest.raises(error):
            read_run(guarded, keys, BLOCK_BYTES)

    for call in (
        lambda: guarded.contains([keys], timeout_s=1),
        lambda: read_run(guarded, keys, BLOCK_BYTES),
        lambda: write_run(guarded, make_keys(1, run="new"), BLOCK_BYTES),
        lambda: guarded.remove(keys, timeout_s=1),
    ):
        with pytest.raises(StorageResting):
            call()
    stats = guarded.stats()
    assert stats.reasons == {"error": 2, "timeout": 1, "breaker_open": 4}
    assert (stats.breaker, stats.recoveries) == ("open", 0)

    clock.advance(5.0)
    assert read_run(guarded, keys, BLOCK_BYTES) == [BlockRead.READ] * 2
    assert state_of(breaker) is BreakerState.CLOSED
    assert (guarded.stats().breaker, guarded.stats().recoveries) == ("closed", 1)


def test_damaged_and_absent_blocks_do_not_open_it() -> None:
    """A miss is an answer: only calls that fail count."""
    guarded, breaker, _ = make_guarded({})

    for _ in range(10):
        read_run(guarded, make_keys(1), BLOCK_BYTES)

    assert state_of(breaker) is BreakerState.CLOSED


def test_impossible_settings_are_refused() -> None:
    """When they are made, not when the store dies."""
    with pytest.raises(ConfigError):
        BreakerConfig(max_failures=0)
    with pytest.raises(ConfigError):
        BreakerConfig(recovery_s=10.0, max_recovery_s=5.0)
