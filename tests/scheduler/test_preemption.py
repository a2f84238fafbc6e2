"""A pool that is too small: victims, what is kept, admission, and progress."""

import numpy as np
import pytest

from headwater.cache import TokenPath
from headwater.scheduler.request import Request
from tests.scheduler.harness import Harness, expected_tokens, make_prompt, make_request


def make_crowd(count: int, *, max_tokens: int = 40) -> list[Request]:
    """Requests without common prefixes that grow far beyond their prompts."""
    return [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=max_tokens)
        for n in range(count)
    ]


def step_until_preempted(harness: Harness) -> int:
    """Run until a sequence was preempted; return the step, from 1."""
    for step in range(1, 1000):
        harness.step()
        if harness.scheduler.stats().num_preemptions:
            return step
    raise AssertionError("no sequence was preempted")


@pytest.mark.parametrize("depth", [1, 2])
def test_the_newest_is_preempted_and_the_oldest_never(depth: int) -> None:
    """Lesson 36: the oldest sequence runs in every step from its first to its last."""
    harness = Harness(num_blocks=20, depth=depth)
    harness.add(*make_crowd(4))
    step_until_preempted(harness)

    assert [s.request_id for s in harness.scheduler._table.waiting] == ["r3"]
    harness.run()
    assert sum("r0" in batch.request_ids for batch in harness.batches) == 40
    assert next(iter(harness.reasons)) == "r0"


def test_the_lowest_priority_is_preempted() -> None:
    """Lesson 36: under the `priority` policy the sequence of the lowest priority is the victim,
    even if it is the oldest."""
    harness = Harness(num_blocks=20, settings={"policy": "priority"})
    crowd = [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=40, priority=3 - n)
        for n in range(4)
    ]
    harness.add(*crowd)

    step_until_preempted(harness)

    assert [s.request_id for s in harness.scheduler._table.waiting] == ["r0"]


def test_a_prefill_is_never_a_victim() -> None:
    """Lesson 36: the only decoding sequence is preempted itself, although it is the oldest, and
    the prefill with the blocks continues without losing a token."""
    harness = Harness(num_blocks=12, settings={"max_num_seqs": 4, "max_batched_tokens": 4})
    harness.add(make_request("old", make_prompt(7), max_tokens=30))
    harness.steps(2)
    harness.add(make_request("new", make_prompt(40, family=1), max_tokens=4))
    step_until_preempted(harness)

    waiting = [s.request_id for s in harness.scheduler._table.waiting]
    harness.run()

    assert waiting == ["old"]
    assert harness.num_computed("new") == 40 + 3
    assert set(harness.reasons.values()) == {"length"}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_victim_computed_is_committed_and_found_again(depth: int) -> None:
    """Lesson 37: prompt and output are an ordinary match; only the tail is computed again."""
    harness = Harness(num_blocks=20, depth=depth)
    harness.add(*make_crowd(3))
    step_until_preempted(harness)
    (victim,) = harness.scheduler._table.waiting
    num_tokens = victim.num_tokens

    found = harness.cache.match(TokenPath(victim.tokens)).device_blocks

    assert num_tokens > 8
    assert found >= (num_tokens - 1) // 4 - 1  # the sequence in need took one block of its tail


def test_a_victim_is_saved_to_a_lower_tier() -> None:
    """Lesson 29: the blocks of a victim are planned for offload although no request hit them;
    nothing waits for the copy."""
    harness = Harness(num_blocks=20, host_blocks=50)
    harness.add(*make_crowd(3))
    step_until_preempted(harness)

    harness.step()

    assert sum(plan.num_blocks for plan in harness.copier.started) >= 2
    assert harness.cache.stats().host.cached >= 2


def test_saving_can_be_turned_off() -> None:
    """Lesson 29: without saving, a victim's blocks are only kept as long as the device can."""
    harness = Harness(num_blocks=20, host_blocks=50, settings={"save_preempted": False})

    harness.run(*make_crowd(3))

    assert harness.scheduler.stats().num_preemptions > 0
    assert harness.copier.started == []


def test_resumed_sequences_are_not_counted_again() -> None:
    """Lesson 62: there is one query and one usage per request, however often it was
    preempted."""
    harness = Harness(num_blocks=20)

    harness.run(*make_crowd(6))

    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 3
    assert harness.cache.stats().ledger.queries == 6
    assert (stats.num_admitted, stats.prompt_tokens) == (6, 48)
    assert all(usage.cached_tokens == 0 for usage in harness.usages.values())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_finishes_after_preemption_is_released_once(depth: int) -> None:
    """Lesson 37: the request may even end by the token of the step that was in flight at the
    preemption."""
    alone = {r.request_id: expected_tokens(r) for r in make_crowd(4)}
    for at in range(8, 30):
        harness = Harness(num_blocks=20, depth=depth)
        stops = [
            make_request(
                name,
                make_prompt(8, family=n),
                max_tokens=40,
                stop_token_ids=(alone[name][at],),
            )
            for n, name in enumerate(alone)
        ]

        harness.run(*stops)

        assert set(harness.reasons.values()) == {"stop"}
        harness.check_empty()


@pytest.mark.parametrize("ends_by", ["abort", "length"])
def test_no_sequence_is_preempted_when_a_step_in_flight_frees_slots(ends_by: str) -> None:
    """With two steps in flight, a sequence that needs a block waits for one that is ending."""
    probe = Harness(num_blocks=12, depth=2)
    probe.add(*make_crowd(2))
    step = step_until_preempted(probe)
    num_rows = sum("r0" in batch.request_ids for batch in probe.batches)

    harness = Harness(num_blocks=12, depth=2)
    old, new = make_crowd(2)
    if ends_by == "length":
        old = make_request("r0", make_prompt(8), max_tokens=num_rows)
    harness.add(old, new)
    harness.steps(step - 1)
    assert harness.scheduler.stats().num_running == 2
    if ends_by == "abort":
        harness.core.abort(old.request_id)
    harness.run()

    assert harness.scheduler.stats().num_preemptions == 0
    assert harness.outputs["r1"] == expected_tokens(new)


def test_no_sequence_is_admitted_in_the_step_that_preempts() -> None:
    """Lesson 36: there is no cycle of preemption and admission: the freed blocks go to the
    sequences that needed them."""
    harness = Harness(num_blocks=20)
    harness.add(*make_crowd(6))

    while harness.core.has_work:
        before = harness.scheduler.stats()
        harness.step()
        after = harness.scheduler.stats()
        if after.num_preemptions > before.num_preemptions:
            assert after.num_running < before.num_running


def test_the_reserve_learns_and_preemption_stops() -> None:
    """Lesson 36: once lengths were observed, the same load runs almost without victims."""
    harness = Harness(num_blocks=60)
    harness.run(*make_crowd(12))
    first = harness.scheduler.stats().num_preemptions
    later = [
        make_request(
            f"later{n}", make_prompt(8, family=n % 9), max_tokens=40, cache_salt=f"{n}"
        )
        for n in range(12)
    ]

    harness.run(*later)

    assert first > 3
    assert harness.scheduler.stats().num_preemptions - first < first / 2


def test_a_refused_head_leaves_no_trace() -> None:
    """Lesson 35: the first and the last check are one function, and a refusal releases what was
    pinned for the check."""
    harness = Harness(num_blocks=20, settings={"max_passes": 0})
    harness.run(make_request("warm", make_prompt(40), max_tokens=1))
    harness.add(make_request("a", make_prompt(32, family=1), max_tokens=30))
    harness.step()
    available = harness.cache.num_available
    harness.add(make_request("b", make_prompt(60), max_tokens=1))
    before = harness.cache.stats()
    harness.step()
    after = harness.cache.stats()

    assert harness.names() == ["a"]
    assert before.leases == after.leases == 1
    assert before.ledger.queries == after.ledger.queries
    assert harness.cache.num_available >= available - 1


def test_shared_blocks_are_counted_once_at_admission() -> None:
    """Lesson 62: a found block without a lease does not also count as room for other blocks."""
    harness = Harness(num_blocks=20)
    harness.run(make_request("warm", make_prompt(41), max_tokens=1))
    harness.add(make_request("a", make_prompt(20, family=1), max_tokens=8))
    harness.step()

    harness.add(make_request("b", make_prompt(64), max_tokens=1))
    harness.step()

    assert harness.names() == ["a"]  # 10 found, 6 to compute, 5 or more of the 15 others in use
    harness.run()
    assert harness.usages["b"].cached_tokens > 0


def test_a_blocked_head_is_passed_a_bounded_number_of_times() -> None:
    """A small request passes a blocked large one, `max_passes` times; then none does."""
    harness = Harness(num_blocks=20, settings={"max_passes": 3, "max_num_seqs": 8})
    harness.add(make_request("a", make_prompt(48), max_tokens=20))
    harness.step()
    harness.add(make_request("big", make_prompt(60, family=1), max_tokens=2))
    harness.add(
        *(make_request(f"s{n}", make_prompt(3, family=2), max_tokens=1) for n in range(9))
    )

    harness.run()

    started = list(
        dict.fromkeys(name for batch in harness.batches for name in batch.request_ids)
    )
    assert started[:5] == ["a", "s0", "s1", "s2", "big"]
    assert list(harness.reasons)[:4] == ["s0", "s1", "s2", "a"]


@pytest.mark.parametrize(("lookahead", "passes"), [(1, False), (2, True)])
def test_no_more_blocked_sequences_are_looked_past_than_allowed(
    lookahead: int, passes: bool
) -> None:
    """The cost of a step is bounded, however many sequences wait."""
    harness = Harness(num_blocks=20, settings={"lookahead": lookahead})
    harness.add(make_request("a", make_prompt(48), max_tokens=20))
    harness.step()
    harness.add(*(make_request(f"big{n}", make_prompt(60, family=1 + n)) for n in range(2)))
    harness.add(make_request("small", make_prompt(3, family=4)))

    harness.step()

    assert ("small" in harness.names()) == passes


def test_nothing_passes_a_preempted_sequence() -> None:
    """A preempted sequence was already running; small new requests must not keep it out."""
    harness = Harness(num_blocks=20)
    harness.add(*make_crowd(3))
    step_until_preempted(harness)
    harness.add(make_request("small", make_prompt(2, family=9), max_tokens=1))

    waited = 0
    while "small" not in harness.reasons:
        assert harness.scheduler._table.waiting.num_preempted >= 1
        harness.step()
        waited += 1

    assert waited > 1
    assert harness.scheduler._table.waiting.num_preempted == 0


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_constant_preemption_changes_no_token(depth: int, caching: bool) -> None:
    """Many long outputs share a pool that holds little more than one, and all end with exact
    tokens."""
    rng = np.random.default_rng(depth)
    # Four of five are short, so that the reserve for growth is always too small.
    requests = [
        make_request(
            f"r{n}",
            make_prompt(int(rng.integers(1, 30)), family=int(rng.integers(3))),
            max_tokens=int(rng.integers(30, 60)) if n % 5 == 0 else 1,
            seed=n,
        )
        for n in range(200)
    ]
    harness = Harness(
        num_blocks=24, depth=depth, settings={"prefix_caching": caching, "max_num_seqs": 24}
    )

    harness.run(*requests)

    assert harness.scheduler.stats().num_preemptions > 20
    for request in requests:
        assert harness.outputs[request.request_id] == expected_tokens(request)
    harness.check_empty()
