"""Links: copies share the bandwidth at every moment, wait in line, and are counted."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.replay.cost import LinkCost
from headwater.replay.links import SharedLink
from tests.search import search


def run_link(cost, jobs):
    """Start each (time, bytes) job at its time; return when each arrives and how long it
    moved."""
    link = SharedLink(cost)
    ends: dict[int, tuple[float, float]] = {}

    def note(number, delivery):
        ends[number] = (delivery.end_s, delivery.busy_s)

    waiting = sorted(enumerate(jobs), key=lambda entry: entry[1][0])
    while waiting or link.next_s() < float("inf"):
        if waiting and waiting[0][1][0] <= link.next_s():
            number, (at_s, size) = waiting.pop(0)
            link.start(size, partial(note, number), now=at_s)
        else:
            link.deliver(link.next_s())
    return [ends[number] for number in range(len(jobs))], link


def test_one_copy_takes_latency_and_bytes_over_bandwidth():
    """100 B at 100 B/s with 0.25 s of latency take 1.25 s."""
    ends, link = run_link(LinkCost(bytes_s=100, latency_s=0.25), [(1.0, 100)])

    assert ends == [(2.25, 1.25)]
    assert (link.num_bytes, link.busy_s) == (100, 1.0)


def test_two_copies_share_the_bandwidth():
    """Calculated by hand, the first has 50 B left when the second comes, then each gets 50 B/s.
    The first ends after another second, at 1.5 s; the second then has 50 B left and ends alone
    at 2.0 s."""
    ends, link = run_link(LinkCost(bytes_s=100), [(0.0, 100), (0.5, 100)])

    assert ends == [(1.5, 1.5), (2.0, 1.5)]
    assert link.busy_s == 2.0


def test_three_copies_of_different_sizes():
    """Calculated by hand at 90 B/s, 30, 60 and 90 B together get 30 B/s each; the first ends at
    1 s, then two get 45 B/s: the second ends at 1 + 30/45 s; the last 30 B alone take 1/3 s."""
    ends, _ = run_link(LinkCost(bytes_s=90), [(0.0, 30), (0.0, 60), (0.0, 90)])

    assert [end for end, _ in ends] == pytest.approx([1.0, 5 / 3, 2.0])


def test_copies_above_the_limit_of_a_link_wait_in_order():
    """On a link with one place copies follow each other, and waiting is not counted as
    moving."""
    ends, _ = run_link(LinkCost(bytes_s=100, max_jobs=1), [(0.0, 100), (0.0, 100), (0.5, 50)])

    assert ends == [(1.0, 1.0), (2.0, 1.0), (2.5, 0.5)]


def test_an_idle_link_is_not_busy_and_never_arrives():
    """A link carries nothing before its first copy and after its last."""
    link = SharedLink(LinkCost(bytes_s=1))
    assert (link.next_s(), link.is_busy) == (float("inf"), False)

    link.start(1, lambda delivery: None, now=5.0)
    assert (link.next_s(), link.is_busy) == (6.0, True)
    link.deliver(6.0)
    assert (link.next_s(), link.is_busy) == (float("inf"), False)


@search(examples=100)
@given(
    jobs=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), min_size=1, max_size=12),
    max_jobs=st.sampled_from([None, 1, 2, 3]),
)
def test_a_link_carries_everything_and_no_faster_than_it_can(jobs, max_jobs):
    """Bytes over busy seconds is the bandwidth in any order; no copy is faster than alone."""
    ends, link = run_link(LinkCost(bytes_s=10, max_jobs=max_jobs), jobs)

    assert link.num_bytes == sum(size for _, size in jobs)
    assert link.busy_s == pytest.approx(link.num_bytes / 10)
    for (at_s, size), (end_s, busy_s) in zip(jobs, ends, strict=True):
        assert busy_s >= size / 10 - 1e-9
        assert end_s >= at_s + size / 10 - 1e-9


def test_a_link_that_carries_nothing_is_refused():
    """A link without bandwidth or without places gets an error message."""
    with pytest.raises(ConfigError, match="must be positive"):
        LinkCost(bytes_s=0)
    with pytest.raises(ConfigError, match="at least one copy"):
        LinkCost(bytes_s=1, max_jobs=0)
