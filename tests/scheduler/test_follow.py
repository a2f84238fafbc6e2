"""Waiting for a prefix that another sequence is computing."""

import pytest

from headwater.cache import InFlight
from headwater.scheduler.admission import starts_prefix_wait
from tests.scheduler.rig import STEP_S, Rig, expected_tokens, make_prompt, make_request

CHUNKED = {"max_num_seqs": 8, "max_batched_tokens": 16}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_newcomer_waits_for_the_prefix_and_then_finds_it(depth: int) -> None:
    """The shared blocks are computed once; a waiter holds nothing meanwhile."""
    rig = Rig(depth=depth, settings=CHUNKED)
    first, second = make_request("a", make_prompt(40)), make_request("b", make_prompt(42))
    rig.add(first, second)
    rig.step()

    (waiter,) = rig.scheduler._table.waiting
    assert (waiter.request_id, waiter.lease, waiter.num_blocks) == ("b", None, 0)
    rig.run()

    assert rig.usages["b"].cached_tokens == 40
    assert rig.runner.num_tokens == 40 + 2 + 14
    assert rig.scheduler.stats().num_prefix_waits == 1
    assert rig.outputs["b"] == expected_tokens(second)


def test_all_followers_of_one_prefix_wake_together() -> None:
    """Lesson 26: no convoy: one computes, then all others start in one step."""
    rig = Rig(num_blocks=200, settings={"max_num_seqs": 32, "max_batched_tokens": 64})
    rig.add(*(make_request(f"r{n}", [*make_prompt(40), n]) for n in range(20)))

    rig.steps(2)

    assert rig.names(0) == ["r0"]
    assert len(rig.names(1)) == 20


def test_too_little_in_flight_is_not_worth_a_wait() -> None:
    """Below the least number of blocks a newcomer computes for itself."""
    rig = Rig(settings={**CHUNKED, "max_batched_tokens": 64, "prefix_wait_min_blocks": 6})
    rig.add(make_request("a", make_prompt(20)), make_request("b", make_prompt(21)))

    rig.step()

    assert rig.names() == ["a", "b"]


def test_a_follower_wakes_when_its_leader_is_aborted() -> None:
    """It goes on with what was committed, and computes the rest."""
    rig = Rig(settings=CHUNKED)
    leader, follower = make_request("a", make_prompt(40)), make_request("b", make_prompt(42))
    rig.add(leader, follower)
    rig.step()

    rig.core.abort(leader.request_id)
    rig.step()
    assert rig.names() == ["b"]
    rig.run()

    assert rig.usages["b"].cached_tokens == 16
    assert rig.outputs["b"] == expected_tokens(follower)


def test_a_follower_wakes_at_its_deadline() -> None:
    """Every wait has an end, also when the leader is slow; it does not wait a second time."""
    rig = Rig(
        settings={**CHUNKED, "long_prefill_tokens": 4, "prefix_wait_timeout_s": 2.5 * STEP_S}
    )
    rig.add(make_request("a", make_prompt(60)), make_request("b", make_prompt(61)))

    rig.steps(4)

    assert [rig.names(step) for step in range(4)] == [["a"], ["a"], ["a"], ["a", "b"]]
    rig.run()
    assert rig.scheduler.stats().num_prefix_waits == 1
    assert rig.usages["b"].cached_tokens == 12


def test_a_waiting_sequence_is_no_leader() -> None:
    """Whatever a match says: only one that runs, and so has its slots, is worth waiting for."""
    rig = Rig(settings=CHUNKED)
    rig.add(make_request("a", make_prompt(40)), make_request("b", make_prompt(42)))
    first, second = rig.scheduler._table.waiting
    match = rig.cache.match(second.path())
    match.in_flight = InFlight(first.request_id, 10)
    alive = rig.scheduler._table.alive

    follows = starts_prefix_wait(second, match, alive, min_blocks=1, until_s=9.0)

    assert not follows
    assert second.prefix_source is None


def test_a_follower_of_a_preempted_leader_wakes() -> None:
    """It does not wait for a sequence that waits itself."""
    rig = Rig(num_blocks=14, settings=CHUNKED)
    rig.add(make_request("old", make_prompt(8, family=1), max_tokens=40))
    rig.step()
    rig.add(
        make_request("a", make_prompt(24), max_tokens=30), make_request("b", make_prompt(24))
    )

    rig.run()

    assert rig.scheduler.stats().num_preemptions > 0
    assert set(rig.reasons.values()) == {"length"}


def test_a_reset_wakes_followers_in_the_end() -> None:
    """What they waited for became unfindable; they compute it, and nobody hangs."""
    rig = Rig(settings=CHUNKED)
    follower = make_request("b", make_prompt(42))
    rig.add(make_request("a", make_prompt(40)), follower)
    rig.step()

    rig.core.reset_cache()
    rig.run()

    assert rig.outputs["b"] == expected_tokens(follower)
