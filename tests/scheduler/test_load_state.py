"""Load, split or recompute: the cheapest by measured rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.scheduler.load_state import (
    LoadDecision,
    LowerTierMatch,
    MeasuredRates,
    QueueAhead,
    choose,
    load_s,
)
from headwater.types import LinkRate
from tests.search import search


def make_choice(
    found: LowerTierMatch,
    *,
    prefill: float | None = 6400.0,
    host: LinkRate | None = None,
    storage: LinkRate | None = None,
    queued: LowerTierMatch | None = None,
    max_wait_s: float = 10.0,
    backlog_tokens: int = 0,
    num_waiting: int = 0,
    num_loading: int = 0,
) -> LoadDecision:
    """By default a block of 64 tokens is computed in 10 ms."""
    rates = MeasuredRates(prefill_tokens_s=prefill, host=host, storage=storage)
    return choose(
        found,
        rates=rates,
        queued=queued or LowerTierMatch(),
        block_tokens=64,
        max_wait_s=max_wait_s,
        ahead=QueueAhead(backlog_tokens, num_waiting, num_loading),
    )


FAST = LinkRate(0.0, 0.001)
SLOW = LinkRate(0.0, 0.1)


def test_a_fast_link_is_used():
    """Loading takes a tenth of the time of computing, so everything is loaded, and the usage
    says so."""
    choice = make_choice(LowerTierMatch(host=8), host=FAST)

    assert (choice.num_blocks, choice.reason) == (8, "load_cheaper")
    assert choice.load_s == pytest.approx(0.008)
    assert choice.recompute_s == pytest.approx(0.08)


def test_a_slow_link_is_not_used():
    """Lesson 45: a request whose load would be slower computes instead, and its usage has the
    reason."""
    choice = make_choice(LowerTierMatch(host=8), host=SLOW)

    assert (choice.num_blocks, choice.reason) == (0, "recompute_cheaper")
    assert choice.load_s == pytest.approx(0.8)


def test_the_head_from_a_fast_tier_and_the_tail_computed():
    """In a split, blocks on the host are loaded and blocks in slow storage are computed."""
    choice = make_choice(LowerTierMatch(host=6, storage=6), host=FAST, storage=SLOW)

    assert (choice.num_blocks, choice.reason) == (6, "split")


def test_a_long_prefix_is_split_where_time_runs_out():
    """Nothing is loaded that arrives after the deadline."""
    choice = make_choice(LowerTierMatch(host=100), host=FAST, max_wait_s=0.0301)

    assert (choice.num_blocks, choice.reason) == (30, "split")


def test_latency_makes_short_loads_expensive():
    """One block is not worth a round trip in which it could be computed three times."""
    far = LinkRate(0.03, 0.0001)

    assert make_choice(LowerTierMatch(storage=1), host=FAST, storage=far).num_blocks == 0
    assert make_choice(LowerTierMatch(storage=9), host=FAST, storage=far).num_blocks == 9


def test_queued_blocks_are_part_of_the_price():
    """Blocks that the link must transfer first are part of the price."""
    assert make_choice(LowerTierMatch(host=4), host=FAST).num_blocks == 4
    assert (
        make_choice(
            LowerTierMatch(host=4), host=FAST, queued=LowerTierMatch(host=99)
        ).num_blocks
        == 0
    )


def test_a_load_is_free_while_other_prompts_are_computed():
    """Computing would begin only after the running prompts, and the load has ended by then."""
    queued = LowerTierMatch(host=100)
    found = LowerTierMatch(host=8)

    alone = make_choice(found, host=FAST, queued=queued)
    behind = make_choice(found, host=FAST, queued=queued, backlog_tokens=12 * 64)

    assert (alone.num_blocks, behind.num_blocks) == (0, 8)


def test_a_burst_loads_although_computing_would_be_faster_for_one_alone():
    """Computing 8 blocks delays each of the others by 80 ms, loading them by 8 ms."""
    queued = LowerTierMatch(host=100)
    found = LowerTierMatch(host=8)

    alone = make_choice(found, host=FAST, queued=queued)
    in_burst = make_choice(found, host=FAST, queued=queued, num_waiting=15)

    assert (alone.reason, in_burst.reason) == ("recompute_cheaper", "load_cheaper")


def test_a_link_that_no_other_sequence_waits_for_delays_none_of_them():
    """Computing delays all waiting sequences; a slow link delays only those that wait for
    it."""
    found, slow = LowerTierMatch(storage=8), LinkRate(0.0, 0.02)

    alone = make_choice(found, host=FAST, storage=slow)
    behind = make_choice(found, host=FAST, storage=slow, num_waiting=15)
    busy = make_choice(found, host=FAST, storage=slow, num_waiting=15, num_loading=15)

    reasons = [each.reason for each in (alone, behind, busy)]
    assert reasons == ["recompute_cheaper", "load_cheaper", "recompute_cheaper"]


def test_a_load_may_take_as_long_as_the_backlog_and_the_longest_wait():
    """A sequence does not wait for its load while other prompts are computed before it."""
    found = LowerTierMatch(host=8)

    short = make_choice(found, host=SLOW, max_wait_s=0.1)
    behind = make_choice(found, host=SLOW, max_wait_s=0.1, backlog_tokens=64 * 100)

    assert (short.num_blocks, behind.num_blocks) == (0, 8)


def test_a_link_without_measurements_is_tried():
    """A link that is never tried would never be measured."""
    assert make_choice(LowerTierMatch(host=4), prefill=None, host=SLOW).reason == "unmeasured"
    assert make_choice(LowerTierMatch(4, 4)).num_blocks == 8


links = st.one_of(
    st.none(),
    st.builds(LinkRate, st.floats(0, 0.1), st.floats(0, 0.05), st.integers(1, 4)),
)


@search(examples=200)
@given(
    found=st.builds(LowerTierMatch, st.integers(0, 50), st.integers(0, 50)),
    queued=st.builds(LowerTierMatch, st.integers(0, 50), st.integers(0, 50)),
    host=links,
    storage=links,
    max_wait_s=st.floats(0, 2),
)
def test_no_choice_is_dearer_than_loading_or_computing_all(
    found, queued, host, storage, max_wait_s
):
    """No choice takes longer than the longest wait."""
    rates = MeasuredRates(prefill_tokens_s=6400.0, host=host, storage=storage)
    choice = choose(
        found,
        rates=rates,
        queued=queued,
        block_tokens=64,
        max_wait_s=max_wait_s,
        ahead=QueueAhead(),
    )

    wait_s = load_s(choice.num_blocks, found, rates, queued)
    cost = wait_s + (found.num_blocks - choice.num_blocks) * 0.01
    whole_s = load_s(found.num_blocks, found, rates, queued)
    assert 0 <= choice.num_blocks <= found.num_blocks
    assert wait_s <= max_wait_s
    assert cost <= found.num_blocks * 0.01 + 1e-9
    assert whole_s > max_wait_s or cost <= whole_s + 1e-9


def test_a_queue_is_shorter_on_a_link_that_carries_several_jobs_at_once():
    """Blocks of two earlier jobs move at once, so the wait for them is halved; the new job
    itself takes its measured time."""
    one, two = LinkRate(0.5, 0.1), LinkRate(0.5, 0.1, num_parallel=2)

    assert one.job_s(4, num_queued=8) == pytest.approx(0.5 + 1.2)
    assert two.job_s(4, num_queued=8) == pytest.approx(0.5 + 0.8)
