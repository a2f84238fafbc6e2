"""The circuit breaker's state machine, on a clock that the test moves."""

import pytest

from headwater.clock import VirtualClock
from headwater.errors import ConfigError
from headwater.storage.breaker import Breaker, BreakerConfig, BreakerState

CONFIG = BreakerConfig(max_failures=3, recovery_s=5.0, max_recovery_s=12.0)
CALL_S = 1.0


def state_of(breaker: Breaker) -> BreakerState:
    return breaker.state


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert breaker.admits(CALL_S)
        breaker.fail()


def test_consecutive_failures_open_the_breaker() -> None:
    """The breaker opens after the last of several failures in a row, and a success resets the
    count."""
    breaker = Breaker(CONFIG, VirtualClock())

    fail(breaker, 2)
    assert state_of(breaker) is BreakerState.CLOSED
    breaker.succeed()
    fail(breaker, 3)
    assert state_of(breaker) is BreakerState.OPEN
    assert not breaker.admits(CALL_S)


def test_lookups_that_work_do_not_hide_reads_that_fail() -> None:
    """Failures in a row are counted for each kind of call."""
    breaker = Breaker(CONFIG, VirtualClock())

    for _ in range(2):
        breaker.fail("read")
        breaker.succeed("contains")
    assert state_of(breaker) is BreakerState.CLOSED
    breaker.fail("read")
    assert state_of(breaker) is BreakerState.OPEN


def test_a_call_that_began_before_does_not_close_it() -> None:
    """Only the trial call shows that the store is back."""
    breaker = Breaker(CONFIG, VirtualClock())
    fail(breaker, 3)

    breaker.succeed()

    assert state_of(breaker) is BreakerState.OPEN


def test_one_trial_call_at_a_time() -> None:
    """However many callers there are, one makes the trial call; its success closes the breaker
    for all."""
    clock = VirtualClock()
    breaker = Breaker(CONFIG, clock)
    fail(breaker, 3)

    clock.advance(4.9)
    assert not breaker.admits(CALL_S)
    clock.advance(0.1)
    assert [breaker.admits(CALL_S) for _ in range(3)] == [True, False, False]
    assert state_of(breaker) is BreakerState.HALF_OPEN
    breaker.succeed()
    assert state_of(breaker) is BreakerState.CLOSED


def test_a_trial_call_that_never_ends_opens_it_again() -> None:
    """Lesson 76: after the trial's own timeout the breaker waits twice as long, and tries again."""
    clock = VirtualClock()
    breaker = Breaker(CONFIG, clock)
    fail(breaker, 3)
    clock.advance(5.0)
    assert breaker.admits(CALL_S)

    clock.advance(CALL_S)
    assert not breaker.admits(CALL_S)
    assert state_of(breaker) is BreakerState.OPEN
    clock.advance(9.9)
    assert not breaker.admits(CALL_S)
    clock.advance(0.1)
    assert breaker.admits(CALL_S)


def test_each_failed_trial_doubles_the_wait_up_to_a_bound() -> None:
    """The waits are 5, 10, 12 and 12 seconds, and 5 again after the breaker was closed for the
    longest wait."""
    clock = VirtualClock()
    breaker = Breaker(CONFIG, clock)
    fail(breaker, 3)

    for wait_s in (5.0, 10.0, 12.0, 12.0):
        clock.advance(wait_s - 0.1)
        assert not breaker.admits(CALL_S)
        clock.advance(0.1)
        fail(breaker, 1)
    clock.advance(12.0)
    assert breaker.admits(CALL_S)
    breaker.succeed()
    clock.advance(12.0)
    fail(breaker, 3)
    clock.advance(5.0)
    assert breaker.admits(CALL_S)


def test_a_store_that_fails_again_soon_is_left_alone_longer() -> None:
    """A store that answers trials but fails under load does not cost three timeouts each
    time."""
    clock = VirtualClock()
    breaker = Breaker(CONFIG, clock)
    fail(breaker, 3)
    clock.advance(5.0)
    assert breaker.admits(CALL_S)
    breaker.succeed()

    fail(breaker, 3)
    clock.advance(9.9)
    assert not breaker.admits(CALL_S)
    clock.advance(0.1)
    assert breaker.admits(CALL_S)


def test_calls_that_fail_after_the_breaker_opened_change_nothing() -> None:
    """The calls began before the breaker opened, so the wait neither restarts nor doubles."""
    clock = VirtualClock()
    breaker = Breaker(CONFIG, clock)
    fail(breaker, 3)

    clock.advance(4.0)
    breaker.fail()
    clock.advance(1.0)
    assert breaker.admits(CALL_S)


def test_impossible_settings_are_refused() -> None:
    """Impossible settings are refused on construction, not when the store fails."""
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        BreakerConfig(max_failures=0)
    with pytest.raises(ConfigError, match=r"at most max_recovery_s, got 10.0 and 5.0"):
        BreakerConfig(recovery_s=10.0, max_recovery_s=5.0)
