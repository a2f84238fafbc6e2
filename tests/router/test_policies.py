"""Routing policies, as pure functions of the candidates."""

import pytest

from headwater.bench._routed_caches import measure_router
from headwater.disagg.routing import (
    BACKLOG_TOKENS,
    CAP_SLACK_TOKENS,
    POLICIES,
    RECENT_S,
    Candidate,
    RecentWork,
    is_swamped,
    make_policy,
    prefills_itself,
)
from headwater.errors import ConfigError
from headwater.server.router.attempts import RetryBudget


def choose(policy, prompt_tokens, *candidates):
    return make_policy(policy).choose(prompt_tokens, candidates).name


def test_round_robin_takes_turns():
    """Neither cached tokens nor running requests change the turn."""
    policy = make_policy("round_robin")
    candidates = [Candidate(name="a", num_alive=9), Candidate(name="b")]

    assert [policy.choose(1, candidates).name for _ in range(4)] == ["a", "b", "a", "b"]


def test_least_load_counts_requests_first():
    """With equal numbers of requests, the recent work decides."""
    a = Candidate(name="a", num_alive=2)
    b = Candidate(name="b", num_alive=1, recent_tokens=9.0)
    c = Candidate(name="c", num_alive=1, recent_tokens=5.0)

    assert choose("least_load", 100, a, b, c) == "c"


def test_cache_aware_goes_where_the_least_is_left_to_do():
    """The instance with the prefix is not chosen when more tokens wait there than the prefix
    saves."""
    home = Candidate(name="home", cached_tokens=900)
    busy = Candidate(name="home", cached_tokens=900, outstanding_tokens=5000)
    other = Candidate(name="other")

    assert choose("cache_aware", 1000, other, home) == "home"
    assert choose("cache_aware", 1000, other, busy) == "other"


def test_a_shared_prefix_does_not_draw_everything():
    """Lesson 70: an instance with much more than its share is not chosen, whatever it has
    cached."""
    home = Candidate(name="home", cached_tokens=999, recent_tokens=4.0 * CAP_SLACK_TOKENS)
    others = [Candidate(name=str(n), recent_tokens=10.0) for n in range(3)]

    assert choose("cache_aware", 1000, home, *others) == "0"


def test_a_quiet_cluster_keeps_a_conversation_together():
    """Lesson 70: one user alone does not overload an instance; the next turn goes to the same
    one."""
    home = Candidate(name="home", cached_tokens=9_000, recent_tokens=20_000.0)
    others = [Candidate(name=str(n)) for n in range(7)]

    assert choose("cache_aware", 9_500, *others, home) == "home"


def test_recent_work_decays_with_time():
    """Recent work falls to 1/e after its mean life."""
    work = RecentWork()
    work.add(1000, now=5.0)
    work.add(1000, now=5.0)

    assert work.tokens(now=5.0) == 2000
    assert work.tokens(now=5.0 + RECENT_S) == pytest.approx(735.8, abs=0.1)
    assert work.tokens(now=0.0) == 2000


def test_a_short_rest_is_prefilled_where_it_is_decoded():
    """Up to the threshold, the rest of a prompt is computed on the decode instance."""
    assert prefills_itself(256, 256)
    assert not prefills_itself(257, 256)


def test_a_prefill_instance_that_cannot_keep_up_is_helped():
    """Lesson 56: the decode instance computes a prompt when the prefill instance has far more
    tokens to compute than the decode instance has."""
    assert not is_swamped(BACKLOG_TOKENS, 0)
    assert is_swamped(BACKLOG_TOKENS + 1, 0)
    assert not is_swamped(BACKLOG_TOKENS + 1, 1)


def test_retries_are_a_share_of_requests():
    """Lesson 56: a few retries are allowed at once, then one for every five requests; unused
    retries do not accumulate."""
    budget = RetryBudget(0.2)

    assert [budget.withdraw() for _ in range(12)] == [True] * 10 + [False] * 2
    for _ in range(5):
        budget.deposit()
    assert [budget.withdraw() for _ in range(2)] == [True, False]
    for _ in range(1000):
        budget.deposit()
    assert sum(budget.withdraw() for _ in range(20)) == 10


def test_unknown_policies_are_refused():
    """The message has the known names."""
    with pytest.raises(ConfigError, match=", ".join(POLICIES)):
        make_policy("random")


@pytest.mark.slow
def test_cache_aware_finds_what_one_pool_would():
    """Lesson 70: in a simulation the policy has the hits of one shared pool with even load,
    which affinity alone does not reach. Two routers reach the same."""
    result = measure_router(None, quick=True)
    router = result["router"]

    assert set(router) == {*POLICIES, "longest_prefix"}
    assert router["cache_aware"]["block_hit"] >= 0.98 * result["pool_block_hit"]
    assert router["cache_aware"]["max_over_mean"] <= 1.2
    assert result["routers"]["share_of_one_router"] >= 0.97
    assert result["routers"]["max_over_mean"] <= 1.3
    assert router["longest_prefix"]["max_over_mean"] > 3
    assert router["round_robin"]["block_hit"] < 0.5 * result["pool_block_hit"]
