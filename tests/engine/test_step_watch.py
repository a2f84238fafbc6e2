"""Log lines about slow steps and a full host tier."""

from headwater.clock import VirtualClock
from headwater.engine.step_watch import SLOW_S, StepWatch
from headwater.metrics.stats import TierStats


def run_steps(
    watch: StepWatch, clock: VirtualClock, *seconds: float, num_tokens: int = 3
) -> None:
    for took_s in seconds:
        began = watch.now()
        clock.advance(took_s)
        watch.note_step(began, num_tokens)


def make_tier(free: int) -> TierStats:
    return TierStats(num_blocks=8, free=free, held=0, cached=8 - free, evictable=0, evicted=0)


def test_a_step_far_over_the_usual_time_is_logged_once_in_a_while(caplog):
    """The line has the time and the usual time; a second slow step soon after has none."""
    clock = VirtualClock()
    watch = StepWatch(clock)

    run_steps(watch, clock, *[0.02] * 50, 5 * SLOW_S, 0.02, 5 * SLOW_S)

    assert len(caplog.records) == 1
    assert "slow step: took_s=5.00 usual_s=0.0200 tokens=3" in caplog.text


def test_a_step_with_a_long_prompt_is_compared_with_others_of_its_size(caplog):
    """On a CPU a step with a long prompt takes a hundred times as long as one with one token,
    and that is usual."""
    clock = VirtualClock()
    watch = StepWatch(clock)

    for _ in range(3):
        run_steps(watch, clock, *[0.02] * 50, num_tokens=1)
        run_steps(watch, clock, 2 * SLOW_S, num_tokens=2048)
    assert not caplog.records

    run_steps(watch, clock, 0.02, num_tokens=1)
    run_steps(watch, clock, 0.02, 5 * SLOW_S, num_tokens=1)
    assert "slow step: took_s=5.00" in caplog.text


def test_steps_that_are_always_long_are_not_slow(caplog):
    """A large model on a CPU needs seconds for each step; that is normal."""
    clock = VirtualClock()

    run_steps(StepWatch(clock), clock, *[3 * SLOW_S] * 20)

    assert not caplog.records


def test_a_full_host_tier_is_logged_once(caplog):
    """A full host tier is normal, but explains why blocks are evicted from now on."""
    caplog.set_level("INFO", logger="headwater")
    clock = VirtualClock()
    watch = StepWatch(clock)

    for free in (3, 0, 0):
        clock.advance(2.0)
        if watch.wants_tiers:
            watch.note_host(make_tier(free))

    assert len(caplog.records) == 1
    assert "host tier is full" in caplog.text
    assert not watch.wants_tiers
