"""Waiting for a prefix that another sequence is computing."""

import pytest

from headwater.cache import InFlight
from headwater.scheduler.prefix_wait import starts_prefix_wait
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
    """Lesson 26: one sequence computes, then all others start in one step."""
    harness = Harness(num_blocks=200, settings={"max_num_seqs": 32, "max_batched_tokens": 64})
    harness.add(*(make_request(f"r{n}", [*make_prompt(40), n]) for n in range(20)))

    harness.steps(2)

    assert harness.names(0) == ["r0"]
    assert len(harness.names(1)) == 20


def test_too_little_in_flight_is_not_worth_a_wait() -> None:
    """With fewer shared blocks in flight than the minimum, a new request computes them
    itself."""
    harness = Harness(
        settings={**CHUNKED, "max_batched_tokens": 64, "prefix_wait_min_blocks": 6}
    )
    harness.add(make_request("a", make_prompt(20)), make_request("b", make_prompt(21)))

    harness.step()

    assert harness.names() == ["a", "b"]


def test_a_prefix_wait_ends_when_the_computing_sequence_is_aborted() -> None:
    """The waiting sequence continues with the committed blocks and computes the rest."""
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


def test_a_wait_for_a_prefix_of_a_peer_ends_at_its_deadline() -> None:
    """A peer may be slow or gone; a sequence waits for one only once."""
    harness = Harness(settings={**CHUNKED, "prefix_wait_timeout_s": 2.5 * STEP_S})
    received = harness.scheduler.add(make_request("a", make_prompt(60)))
    harness.scheduler.handoffs.expect(received)
    harness.scheduler.handoffs.invite(received)
    waiter = make_request("b", make_prompt(12))
    harness.steps(1)
    harness.add(waiter)

    harness.steps(3)
    assert not harness.batches
    harness.run_until("b", max_steps=12)

    assert harness.scheduler.stats().num_prefix_waits == 1
    assert harness.outputs["b"] == expected_tokens(waiter)


def test_a_prefix_wait_lasts_as_long_as_its_prefill() -> None:
    """Computing the prefix again would take no less time: the wait has no deadline."""
    harness = Harness(
        settings={**CHUNKED, "long_prefill_tokens": 4, "prefix_wait_timeout_s": STEP_S}
    )
    harness.add(make_request("a", make_prompt(60)), make_request("b", make_prompt(61)))
    harness.run()

    assert harness.usages["b"].cached_tokens == 60


def test_a_long_prefill_is_computed_for_those_that_wait_for_its_beginning() -> None:
    """Many prompts are shorter than the long one and go before it. The waiter lacks fewer
    tokens than each of them, so the beginning of the long one is computed before them."""
    harness = Harness(num_blocks=2000, settings={**CHUNKED, "max_num_seqs": 16})
    harness.add(make_request("long", make_prompt(1600), max_tokens=1))
    harness.steps(1)
    for family in range(1, 20):
        request = make_request(f"m{family}", make_prompt(200, family=family), max_tokens=1)
        harness.add(request)
    harness.steps(2)
    waiter = make_request("b", [*make_prompt(64), 7], max_tokens=1)
    harness.run_until("b", waiter, max_steps=12)

    assert harness.usages["b"].cached_tokens == 64
    assert harness.outputs["b"] == expected_tokens(waiter)


def test_a_waiter_waits_again_for_what_follows_its_prefix() -> None:
    """Two requests share more with each other than with the one before them: all they share is
    computed once."""
    harness = Harness(num_blocks=200, settings=CHUNKED)
    first = make_request("a", make_prompt(40), max_tokens=1)
    shared = [*make_prompt(40), *make_prompt(80, family=1)]
    harness.add(first, make_request("b", [*shared, 1]), make_request("c", [*shared, 2]))
    harness.run()

    assert harness.usages["b"].cached_tokens == 40
    assert harness.usages["c"].cached_tokens == 120


def test_waiters_of_an_aborted_prefill_wait_for_the_next_one() -> None:
    """One waiter computes the prefix, and the others do not compute it at the same time."""
    harness = Harness(num_blocks=400, settings=CHUNKED)
    source = make_request("a", make_prompt(200), max_tokens=1)
    harness.add(source, *(make_request(f"r{n}", [*make_prompt(200), n]) for n in range(6)))
    harness.steps(2)
    harness.core.abort(source.request_id)
    harness.run()

    assert [harness.usages[f"r{n}"].cached_tokens for n in range(6)] == [32] + 5 * [200]


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
    """A sequence does not wait for another one that waits itself."""
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
