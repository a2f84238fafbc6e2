"""Waiting for a prefix that another sequence is computing."""

import pytest

from headwater.cache import InFlight
from headwater.scheduler.admission import starts_prefix_wait
from tests.scheduler.harness import STEP_S, Harness, expected_tokens, make_prompt, make_request

CHUNKED = {"max_num_seqs": 8, "max_batched_tokens": 16}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_new_request_waits_for_the_prefix_and_then_finds_it(depth: int) -> None:
    """The shared blocks are computed once; a waiter holds nothing meanwhile."""
    harness = Harness(depth=depth, settings=CHUNKED)
    first, second = make_request("a", make_prompt(40)), make_request("b", make_prompt(42))
    harness.add(first, second)
    harness.step()

    (waiter,) = harness.scheduler._table.waiting
    assert (waiter.request_id, waiter.lease, waiter.num_blocks) == ("b", None, 0)
    harness.run()

    assert harness.usages["b"].cached_tokens == 40
    assert harness.runner.num_tokens == 40 + 2 + 14
    assert harness.scheduler.stats().num_prefix_waits == 1
    assert harness.outputs["b"] == expected_tokens(second)


def test_all_sequences_waiting_for_one_prefix_start_together() -> None:
    """Lesson 26: one computes, then all others start in one step."""
    harness = Harness(num_blocks=200, settings={"max_num_seqs": 32, "max_batched_tokens": 64})
    harness.add(*(make_request(f"r{n}", [*make_prompt(40), n]) for n in range(20)))

    harness.steps(2)

    assert harness.names(0) == ["r0"]
    assert len(harness.names(1)) == 20


def test_too_little_in_flight_is_not_worth_a_wait() -> None:
    """With fewer blocks than the minimum, a new request computes them itself."""
    harness = Harness(
        settings={**CHUNKED, "max_batched_tokens": 64, "prefix_wait_min_blocks": 6}
    )
    harness.add(make_request("a", make_prompt(20)), make_request("b", make_prompt(21)))

    harness.step()

    assert harness.names() == ["a", "b"]


def test_a_prefix_wait_ends_when_the_computing_sequence_is_aborted() -> None:
    """It continues with the committed blocks and computes the rest."""
    harness = Harness(settings=CHUNKED)
    source, waiter = make_request("a", make_prompt(40)), make_request("b", make_prompt(42))
    harness.add(source, waiter)
    harness.step()

    harness.core.abort(source.request_id)
    harness.step()
    assert harness.names() == ["b"]
    harness.run()

    assert harness.usages["b"].cached_tokens == 16
    assert harness.outputs["b"] == expected_tokens(waiter)


def test_a_prefix_wait_ends_at_its_deadline() -> None:
    """Every wait has an end, even if the source is slow; a sequence waits only once."""
    harness = Harness(
        settings={**CHUNKED, "long_prefill_tokens": 4, "prefix_wait_timeout_s": 2.5 * STEP_S}
    )
    harness.add(make_request("a", make_prompt(60)), make_request("b", make_prompt(61)))

    harness.steps(4)

    assert [harness.names(step) for step in range(4)] == [["a"], ["a"], ["a"], ["a", "b"]]
    harness.run()
    assert harness.scheduler.stats().num_prefix_waits == 1
    assert harness.usages["b"].cached_tokens == 12


def test_no_sequence_waits_for_a_waiting_sequence() -> None:
    """A sequence waits only for one that runs and therefore has its slots."""
    harness = Harness(settings=CHUNKED)
    harness.add(make_request("a", make_prompt(40)), make_request("b", make_prompt(42)))
    first, second = harness.scheduler._table.waiting
    match = harness.cache.match(second.path())
    match.in_flight = InFlight(first.request_id, 10)
    alive = harness.scheduler._table.alive

    waits = starts_prefix_wait(second, match, alive, min_blocks=1, until_s=9.0)

    assert not waits
    assert second.prefix_source is None


def test_a_prefix_wait_ends_when_the_computing_sequence_is_preempted() -> None:
    """It does not wait for a sequence that waits itself."""
    harness = Harness(num_blocks=14, settings=CHUNKED)
    harness.add(make_request("old", make_prompt(8, family=1), max_tokens=40))
    harness.step()
    harness.add(
        make_request("a", make_prompt(24), max_tokens=30), make_request("b", make_prompt(24))
    )

    harness.run()

    assert harness.scheduler.stats().num_preemptions > 0
    assert set(harness.reasons.values()) == {"length"}


def test_a_prefix_wait_ends_after_a_reset() -> None:
    """The awaited blocks became unfindable; the sequences compute them, and every request
    ends."""
    harness = Harness(settings=CHUNKED)
    waiter = make_request("b", make_prompt(42))
    harness.add(make_request("a", make_prompt(40)), waiter)
    harness.step()

    harness.core.reset_cache()
    harness.run()

    assert harness.outputs["b"] == expected_tokens(waiter)
