"""A pool that is too small: who gives way, what is kept, who is admitted, and that it ends."""

import numpy as np
import pytest

from headwater.cache import TokenPath
from headwater.scheduler.request import Request
from tests.scheduler.rig import Rig, expected_tokens, make_prompt, make_request


def make_crowd(count: int, *, max_tokens: int = 40) -> list[Request]:
    """Requests that share nothing and grow far beyond their prompts."""
    return [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=max_tokens)
        for n in range(count)
    ]


def step_until_preempted(rig: Rig) -> int:
    """Turn the loop until somebody had to give way; in which step that was, from 1."""
    for step in range(1, 1000):
        rig.step()
        if rig.scheduler.stats().num_preemptions:
            return step
    raise AssertionError("nobody had to give way")


@pytest.mark.parametrize("depth", [1, 2])
def test_the_newest_gives_way_and_the_oldest_is_never_disturbed(depth: int) -> None:
    """Lesson 36: the oldest runs in every step from its first to its last."""
    rig = Rig(num_blocks=20, depth=depth)
    rig.add(*make_crowd(4))
    step_until_preempted(rig)

    assert [s.request_id for s in rig.scheduler._table.waiting] == ["r3"]
    rig.run()
    assert sum("r0" in batch.request_ids for batch in rig.batches) == 40
    assert next(iter(rig.reasons)) == "r0"


def test_the_lowest_priority_gives_way() -> None:
    """Lesson 36: under the `priority` policy, even if it is the oldest."""
    rig = Rig(num_blocks=20, settings={"policy": "priority"})
    crowd = [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=40, priority=3 - n)
        for n in range(4)
    ]
    rig.add(*crowd)

    step_until_preempted(rig)

    assert [s.request_id for s in rig.scheduler._table.waiting] == ["r0"]


def test_a_prefill_is_never_a_victim() -> None:
    """Lesson 36: the only decoding sequence gives way itself, though it is the oldest, and
    the prefill that has the blocks goes on without losing a token."""
    rig = Rig(num_blocks=12, settings={"max_num_seqs": 4, "max_batched_tokens": 4})
    rig.add(make_request("old", make_prompt(7), max_tokens=30))
    rig.steps(2)
    rig.add(make_request("new", make_prompt(40, family=1), max_tokens=4))
    step_until_preempted(rig)

    waiting = [s.request_id for s in rig.scheduler._table.waiting]
    rig.run()

    assert waiting == ["old"]
    assert rig.num_computed("new") == 40 + 3
    assert set(rig.reasons.values()) == {"length"}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_victim_computed_is_committed_and_found_again(depth: int) -> None:
    """Lesson 37: prompt and output are an ordinary match; only the tail is computed again."""
    rig = Rig(num_blocks=20, depth=depth)
    rig.add(*make_crowd(3))
    step_until_preempted(rig)
    (victim,) = rig.scheduler._table.waiting
    num_tokens = victim.num_tokens

    found = rig.cache.match(TokenPath(victim.tokens)).device_blocks

    assert num_tokens > 8
    assert found >= (num_tokens - 1) // 4 - 1  # the needy took one block of its tail


def test_a_victim_is_saved_to_a_lower_tier() -> None:
    """Lesson 29, the decision: its blocks are planned for demotion although nobody hit them;
    nothing waits for the copy."""
    rig = Rig(num_blocks=20, host_blocks=50)
    rig.add(*make_crowd(3))
    step_until_preempted(rig)

    rig.step()

    assert sum(plan.num_blocks for plan in rig.copier.started) >= 2
    assert rig.cache.stats().host.cached >= 2


def test_saving_can_be_turned_off() -> None:
    """Lesson 29: then a victim's blocks are only kept as long as the device can."""
    rig = Rig(num_blocks=20, host_blocks=50, settings={"save_preempted": False})

    rig.run(*make_crowd(3))

    assert rig.scheduler.stats().num_preemptions > 0
    assert rig.copier.started == []


def test_resumed_sequences_are_not_counted_again() -> None:
    """Lesson 62: one query and one usage a request, however often it was preempted."""
    rig = Rig(num_blocks=20)

    rig.run(*make_crowd(6))

    stats = rig.scheduler.stats()
    assert stats.num_preemptions > 3
    assert rig.cache.stats().ledger.queries == 6
    assert (stats.num_admitted, stats.prompt_tokens) == (6, 48)
    assert all(usage.cached_tokens == 0 for usage in rig.usages.values())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_finishes_after_preemption_is_released_once(depth: int) -> None:
    """Lesson 37: also when the step in flight, as it leaves, turns out to end it."""
    alone = {r.request_id: expected_tokens(r) for r in make_crowd(4)}
    for at in range(8, 30):
        rig = Rig(num_blocks=20, depth=depth)
        stops = [
            make_request(
                name,
                make_prompt(8, family=n),
                max_tokens=40,
                stop_token_ids=(alone[name][at],),
            )
            for n, name in enumerate(alone)
        ]

        rig.run(*stops)

        assert set(rig.reasons.values()) == {"stop"}
        rig.check_empty()


@pytest.mark.parametrize("ends_by", ["abort", "length"])
def test_nobody_gives_way_when_a_step_in_flight_makes_room(ends_by: str) -> None:
    """With two steps in flight, a sequence that needs a block waits for one that is ending."""
    probe = Rig(num_blocks=12, depth=2)
    probe.add(*make_crowd(2))
    step = step_until_preempted(probe)
    num_rows = sum("r0" in batch.request_ids for batch in probe.batches)

    rig = Rig(num_blocks=12, depth=2)
    old, new = make_crowd(2)
    if ends_by == "length":
        old = make_request("r0", make_prompt(8), max_tokens=num_rows)
    rig.add(old, new)
    rig.steps(step - 1)
    assert rig.scheduler.stats().num_running == 2
    if ends_by == "abort":
        rig.core.abort(old.request_id)
    rig.run()

    assert rig.scheduler.stats().num_preemptions == 0
    assert rig.outputs["r1"] == expected_tokens(new)


def test_nobody_is_admitted_in_the_step_that_preempts() -> None:
    """Lesson 36: no preempt, admit, preempt: the freed blocks are for those who needed them."""
    rig = Rig(num_blocks=20)
    rig.add(*make_crowd(6))

    while rig.core.has_work:
        before = rig.scheduler.stats()
        rig.step()
        after = rig.scheduler.stats()
        if after.num_preemptions > before.num_preemptions:
            assert after.num_running < before.num_running


def test_the_reserve_learns_and_preemption_stops() -> None:
    """Lesson 36: once lengths were observed, the same load runs almost without victims."""
    rig = Rig(num_blocks=60)
    rig.run(*make_crowd(12))
    first = rig.scheduler.stats().num_preemptions
    later = [
        make_request(
            f"later{n}", make_prompt(8, family=n % 9), max_tokens=40, cache_salt=f"{n}"
        )
        for n in range(12)
    ]

    rig.run(*later)

    assert first > 3
    assert rig.scheduler.stats().num_preemptions - first < first / 2


def test_a_refused_head_leaves_no_trace() -> None:
    """Lesson 35: the last check and the first are one function, and a refusal gives back
    what was pinned to find out."""
    rig = Rig(num_blocks=20, settings={"max_passes": 0})
    rig.run(make_request("warm", make_prompt(40), max_tokens=1))
    rig.add(make_request("a", make_prompt(32, family=1), max_tokens=30))
    rig.step()
    available = rig.cache.num_available
    rig.add(make_request("b", make_prompt(60), max_tokens=1))
    before = rig.cache.stats()
    rig.step()
    after = rig.cache.stats()

    assert rig.names() == ["a"]
    assert before.leases == after.leases == 1
    assert before.ledger.queries == after.ledger.queries
    assert rig.cache.num_available >= available - 1


def test_shared_blocks_are_counted_once_at_admission() -> None:
    """Lesson 62: a found block that nobody has leased is not room for other blocks too."""
    rig = Rig(num_blocks=20)
    rig.run(make_request("warm", make_prompt(41), max_tokens=1))
    rig.add(make_request("a", make_prompt(20, family=1), max_tokens=8))
    rig.step()

    rig.add(make_request("b", make_prompt(64), max_tokens=1))
    rig.step()

    assert rig.names() == ["a"]  # 10 found, 6 to compute, 5 or more of the 15 others in use
    rig.run()
    assert rig.usages["b"].cached_tokens > 0


def test_a_blocked_head_is_passed_a_bounded_number_of_times() -> None:
    """A small request passes a blocked big one, `max_passes` times; then nothing does."""
    rig = Rig(num_blocks=20, settings={"max_passes": 3, "max_num_seqs": 8})
    rig.add(make_request("a", make_prompt(48), max_tokens=20))
    rig.step()
    rig.add(make_request("big", make_prompt(60, family=1), max_tokens=2))
    rig.add(*(make_request(f"s{n}", make_prompt(3, family=2), max_tokens=1) for n in range(9)))

    rig.run()

    started = list(dict.fromkeys(name for batch in rig.batches for name in batch.request_ids))
    assert started[:5] == ["a", "s0", "s1", "s2", "big"]
    assert list(rig.reasons)[:4] == ["s0", "s1", "s2", "a"]


@pytest.mark.parametrize(("lookahead", "passes"), [(1, False), (2, True)])
def test_no_more_blocked_sequences_are_looked_past_than_allowed(
    lookahead: int, passes: bool
) -> None:
    """A step's cost is bounded however many wait."""
    rig = Rig(num_blocks=20, settings={"lookahead": lookahead})
    rig.add(make_request("a", make_prompt(48), max_tokens=20))
    rig.step()
    rig.add(*(make_request(f"big{n}", make_prompt(60, family=1 + n)) for n in range(2)))
    rig.add(make_request("small", make_prompt(3, family=4)))

    rig.step()

    assert ("small" in rig.names()) == passes


def test_nothing_passes_a_preempted_sequence() -> None:
    """It had its turn and lost it; small newcomers must not keep it out."""
    rig = Rig(num_blocks=20)
    rig.add(*make_crowd(3))
    step_until_preempted(rig)
    rig.add(make_request("small", make_prompt(2, family=9), max_tokens=1))

    waited = 0
    while "small" not in rig.reasons:
        assert rig.scheduler._table.waiting.num_preempted >= 1
        rig.step()
        waited += 1

    assert waited > 1
    assert rig.scheduler._table.waiting.num_preempted == 0


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_constant_preemption_changes_no_token(depth: int, caching: bool) -> None:
    """Many long outputs in a pool that holds hardly more than one: all end, exactly."""
    rng = np.random.default_rng(depth)
    # Four in five are short, so that the reserve for growth is always too small.
    requests = [
        make_request(
            f"r{n}",
            make_prompt(int(rng.integers(1, 30)), family=int(rng.integers(3))),
            max_tokens=int(rng.integers(30, 60)) if n % 5 == 0 else 1,
            seed=n,
        )
        for n in range(200)
    ]
    rig = Rig(
        num_blocks=24, depth=depth, settings={"prefix_caching": caching, "max_num_seqs": 24}
    )

    rig.run(*requests)

    assert rig.scheduler.stats().num_preemptions > 20
    for request in requests:
        assert rig.outputs[request.request_id] == expected_tokens(request)
    rig.check_empty()
