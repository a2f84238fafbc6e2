"""The loop sleeps while there is nothing to do: turns without progress are counted and few."""

from typing import Any

import pytest

from tests.scheduler.harness import Harness, make_prompt, make_request, make_storage

TURN_S = 20e-6


def turn(harness: Harness, seconds: float) -> int:
    """Run the loop like an engine process for `seconds`, with turns of 20 us; return how many
    turns made no progress."""
    before = harness.core.stats().num_idle_turns
    end_s = harness.clock.now() + seconds
    while (now := harness.clock.now()) < end_s:
        if harness.core.has_work:
            harness.core.step()
            harness.clock.advance(TURN_S)
        else:
            sleep_s = harness.core.sleep_s()
            harness.clock.advance(end_s - now if sleep_s is None else max(sleep_s, 1e-6))
    return harness.core.stats().num_idle_turns - before


def make_harness(**settings: Any) -> Harness:
    """A lookup is sent to storage, which does not answer."""
    return Harness(
        num_blocks=400, host_blocks=64, stored=make_storage(), held=True, settings=settings
    )


def add(harness: Harness, count: int) -> None:
    for number in range(count):
        prompt = [*make_prompt(13, family=number % 39), number % 40]
        harness.add(make_request(f"r{number}", prompt, max_tokens=2))


def test_turns_without_progress_are_counted() -> None:
    """The count would show a busy loop; a turn that computes is not counted."""
    harness = make_harness()
    harness.core.pause()
    add(harness, 1)
    harness.steps(2)  # the lookup is sent
    before = harness.core.stats().num_idle_turns

    harness.steps(5)
    assert harness.core.stats().num_idle_turns == before + 5

    busy = Harness()
    busy.run(make_request("a", make_prompt(13), max_tokens=2))
    assert busy.core.stats().num_idle_turns == 0


def test_a_paused_engine_with_an_unanswered_lookup_sleeps() -> None:
    """A wait has timed out and nothing can start: the loop must not turn again and again."""
    harness = make_harness()
    harness.core.pause()
    add(harness, 1)

    assert turn(harness, 1.0) <= 2


@pytest.mark.parametrize("num_waiting", [8, 16, 17, 40, 100])
def test_the_loop_sleeps_with_a_queue_longer_than_it_examines(num_waiting: int) -> None:
    """Waits of sequences that are not examined do not wake the loop."""
    harness = make_harness(max_num_seqs=4, max_batched_tokens=2048)
    add(harness, num_waiting)

    assert turn(harness, 0.1) <= 4


def test_requests_that_come_while_others_wait_do_not_keep_the_loop_turning() -> None:
    """Each new request costs at most two turns without progress, not a busy loop."""
    harness = make_harness(max_num_seqs=4, max_batched_tokens=2048)
    idle = 0
    for number in range(30):
        harness.add(make_request(f"n{number}", make_prompt(13, family=number), max_tokens=2))
        idle += turn(harness, 0.01)

    assert idle <= 2 * 30


def test_a_draining_engine_with_a_transfer_in_flight_sleeps() -> None:
    """A reload waits for transfers without busy turns."""
    harness = Harness(num_blocks=16, host_blocks=64, held=True)
    harness.core.allow_reload(lambda folder: None)  # type: ignore[arg-type,return-value]
    harness.run(make_request("a", make_prompt(33), max_tokens=1))
    harness.add(make_request("b", make_prompt(33), max_tokens=1))
    harness.core._reload.begin(None, 1.0, lambda info: None, lambda exc: None, now=0.0)

    assert turn(harness, 0.5) <= 2


def test_every_request_still_ends_when_storage_never_answers() -> None:
    """Sleeping longer loses no request: the lookups time out, and all are computed."""
    harness = make_harness(max_num_seqs=4, max_batched_tokens=2048)
    add(harness, 40)

    harness.run()

    assert set(harness.reasons.values()) == {"length"}
    assert len(harness.reasons) == 40
    assert harness.core.stats().num_idle_turns <= 2 * 40
