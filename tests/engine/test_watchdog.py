"""The watchdog of device steps: only a wait that is too long ends the engine."""

import threading

from headwater.clock import VirtualClock
from headwater.engine.watchdog import StepWatchdog


class Loop:
    """The part of a loop that a watchdog reads."""

    device_since: tuple[float, int] | None = None
    failure: str | None = None


class SteppedEvent(threading.Event):
    """Ends each wait at once and runs the next step of a script; it is set when the script has
    ended."""

    def __init__(self, looks):
        super().__init__()
        self._looks = iter(looks)

    def wait(self, timeout=None):
        look = next(self._looks, None)
        if look is not None:
            look()
        return look is None


def watch(*looks, loop, clock):
    """Run the watch over a script, in this thread; return the reasons it reported."""
    reasons: list[str] = []
    watchdog = StepWatchdog(loop, 10.0, reasons.append, clock)
    watchdog._stopped = SteppedEvent(looks)
    watchdog._watch()
    return reasons


def test_a_loop_that_sleeps_or_ends_its_steps_in_time_is_left_alone():
    """Time alone means nothing: the loop may sleep for hours, and each wait is timed
    separately."""
    clock, loop = VirtualClock(), Loop()

    def sleep():
        clock.advance(3600.0)

    def next_step():
        clock.advance(9.0)
        loop.device_since = clock.now() - 9.0, 1

    assert watch(sleep, next_step, next_step, next_step, loop=loop, clock=clock) == []


def test_a_step_that_does_not_end_is_reported_once():
    """The report has the step's number and the bound."""
    clock, loop = VirtualClock(), Loop()

    def hang():
        loop.device_since = loop.device_since or (clock.now(), 7)
        clock.advance(4.0)

    (reasons,) = watch(hang, hang, hang, hang, hang, loop=loop, clock=clock)

    assert reasons.startswith("step 7 did not end within 10 s")


def test_a_step_that_goes_on_although_a_rank_is_lost_ends_long_before_the_timeout():
    """A collective between GPUs waits for a lost rank; the message names the rank."""
    clock, loop = VirtualClock(), Loop()

    def wait():
        loop.device_since = loop.device_since or (clock.now(), 7)
        clock.advance(3.0)

    def lose():
        loop.failure = "rank 1 of 2 failed"
        clock.advance(3.0)

    assert watch(wait, lose, lose, loop=loop, clock=clock) == ["rank 1 of 2 failed"]
