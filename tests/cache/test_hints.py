"""Hints about sessions: closed sessions are evicted first, promises are kept, everything is
bounded."""

import pytest

from headwater.cache import FinishedRequest, Hint, Namespace
from headwater.cache import sessions as limits
from headwater.cache.policy import POLICIES
from headwater.types import WritePolicy
from tests.cache.make import BLOCK, begin, blocks_by_tier, make_cache, make_path, write_down

CLOSED, PENDING = Hint(closed=True), Hint()


def serve(cache, path, session="", hint=None, now=0.0, output=0):
    """Serve a whole request of `session`, from its match to its release."""
    lease, held = begin(cache, path)
    surplus = cache.commit(lease, path, held, now=now)
    finished = FinishedRequest(len(path.tokens), output, session, hint)
    cache.release(lease, now=now, slots=surplus, finished=finished)


def make_room(cache, count, now=0.0):
    """Take this many blocks and return them, so that other blocks are evicted."""
    slots = cache.take(count, now=now)
    assert slots is not None
    cache.free(slots)
    cache.check()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_closed_session_goes_first_under_every_policy(name):
    """The blocks of a closed session are evicted before those of sessions that were used
    earlier."""
    cache = make_cache(device_blocks=8, eviction=name)
    for first, hint in ((1, None), (2, None), (3, CLOSED)):
        serve(cache, make_path(first, first + 10), f"s{first}", hint)
    cache.check()
    make_room(cache, 4)

    assert [blocks_by_tier(cache, make_path(n, n + 10))[0] for n in (1, 2, 3)] == [2, 2, 0]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_session_can_be_closed_later_by_its_name(name):
    """Closing reports whether the session was known; a closed session is forgotten."""
    cache = make_cache(device_blocks=8, eviction=name)
    for first in (1, 2, 3):
        serve(cache, make_path(first, first + 10), f"s{first}")

    assert cache.close_session(Namespace(), "s2")
    assert not cache.close_session(Namespace(), "s2")
    make_room(cache, 4)
    assert [blocks_by_tier(cache, make_path(n, n + 10))[0] for n in (1, 2, 3)] == [2, 0, 2]
    assert cache.stats().sessions.hints == {"closed": 1}


def test_shared_blocks_stay_when_a_session_is_closed():
    """A prefix that existed before the session, and a prefix that another path continues,
    stay."""
    cache = make_cache(device_blocks=12)
    serve(cache, make_path(1, 2))
    serve(cache, make_path(1, 2, 3, 4), "mine")
    serve(cache, make_path(1, 2, 3, 9), "other")
    serve(cache, make_path(20, 21))
    cache.close_session(Namespace(), "mine")
    make_room(cache, 12 - 7 + 1)

    assert blocks_by_tier(cache, make_path(1, 2, 3, 9)) == (4, 0, 0)
    assert blocks_by_tier(cache, make_path(1, 2, 3, 4)) == (3, 0, 0)
    assert blocks_by_tier(cache, make_path(20, 21)) == (2, 0, 0)


def test_no_tenant_closes_the_session_of_another():
    """Lesson 67: a session belongs to the namespace of its requests."""
    cache = make_cache(device_blocks=8)
    theirs = Namespace(salt="theirs")
    serve(cache, make_path(1, 2, namespace=theirs), "s")

    assert not cache.close_session(Namespace(), "s")
    assert cache.close_session(theirs, "s")


def test_a_closed_session_that_returns_is_only_a_miss():
    """Hints are soft: the session is served, and counts like any other from then on."""
    cache = make_cache(device_blocks=8, eviction="session")
    serve(cache, make_path(1, 2), "s", CLOSED)
    serve(cache, make_path(5, 6), "t")
    serve(cache, make_path(1, 2, 3), "s", now=1.0)
    cache.check()
    make_room(cache, 4, now=2.0)

    assert cache.close_session(Namespace(), "s")
    assert (
        blocks_by_tier(cache, make_path(1, 2, 3))[0] + blocks_by_tier(cache, make_path(5, 6))[0]
        == 4
    )


def test_a_session_in_use_is_not_touched_by_closing_it():
    """Lesson 12: leased blocks stay; closing changes only the order of the others."""
    cache = make_cache(device_blocks=8)
    serve(cache, make_path(1, 2), "s")
    lease, held = begin(cache, make_path(1, 2, 3))
    assert cache.close_session(Namespace(), "s")
    cache.check()
    make_room(cache, 5)
    cache.release(lease, now=0.0, slots=held)

    assert blocks_by_tier(cache, make_path(1, 2)) == (2, 0, 0)


def test_closed_blocks_go_first_from_the_host_too():
    """On the host tier, blocks of closed sessions are also evicted before others."""
    cache = make_cache(device_blocks=8, host_blocks=6, eviction="session")
    for first in (1, 2, 3):
        path = make_path(first, first + 10)
        serve(cache, path, f"s{first}")
        lease = cache.lease(cache.match(path), owner="w", now=0.0)
        cache.save(lease)
        cache.release(lease, now=0.0)
        write_down(cache)
    cache.close_session(Namespace(), "s3")
    cache.check()
    freed = cache._evictor.evict_host(2)
    cache.check()

    assert freed == 2
    assert len(cache.match(make_path(3, 13)).nodes[-1].host) == 0
    assert len(cache.match(make_path(1, 11)).nodes[-1].host) == 2


def test_a_pending_session_is_kept_longer_than_others():
    """With the session policy, a promise makes a return more likely at every age."""
    cache = make_cache(device_blocks=8 * 64, eviction="session", hint_share=1.0)
    for number in range(1, 8):
        hint = PENDING if number == 1 else None
        serve(cache, long_path(number), f"s{number}", hint, now=10.0 * number)
    make_room(cache, 7 * 64, now=100.0)

    assert blocks_by_tier(cache, long_path(1))[0] == 64


def long_path(number):
    """As many tokens as the session policy needs to distinguish prompts."""
    return make_path(*[number] * 64)


def test_promises_are_bounded_by_a_budget_for_each_tenant():
    """The budget is a quarter of the blocks. Further sessions are served without a promise, and
    other tenants are not affected. A promise that was kept, or is over, frees its part."""
    cache = make_cache(device_blocks=16, hint_share=0.25)
    other = Namespace(salt="other")
    serve(cache, make_path(1, 2, 3), "a", PENDING)
    serve(cache, make_path(4, 5), "b", PENDING)
    serve(cache, make_path(6, 7, namespace=other), "a", PENDING)
    assert cache.stats().sessions.hints == {"granted": 2, "over_budget": 1}
    assert cache.stats().sessions.promised_blocks == 5

    serve(cache, make_path(1, 2, 3), "a")
    assert cache.stats().sessions.promised_blocks == 2
    serve(cache, make_path(4, 5), "b", PENDING)
    serve(cache, make_path(8, 9, 10), "c", PENDING, now=1_000.0)

    assert cache.stats().sessions.hints == {"granted": 4, "over_budget": 1}
    assert cache.stats().sessions.promised_blocks == 3


def test_sessions_that_are_remembered_are_bounded(monkeypatch):
    """The session unused for longest is forgotten, of the same tenant first."""
    monkeypatch.setattr(limits, "MAX_OF_TENANT", 3)
    monkeypatch.setattr(limits, "MAX_SESSIONS", 4)
    cache = make_cache(device_blocks=16)
    for number in (1, 2, 3, 1, 4):
        serve(cache, make_path(number), f"s{number}")
    known = [cache.close_session(Namespace(), f"s{n}") for n in (1, 2, 3, 4)]
    assert known == [True, False, True, True]

    for number in range(6):
        tenant = Namespace(salt=str(number))
        serve(cache, make_path(1, namespace=tenant), "s", PENDING)
    assert cache.stats().sessions.num_sessions == 4
    assert not cache.close_session(Namespace(salt="0"), "s")
    assert cache.close_session(Namespace(salt="5"), "s")


def test_timers_of_hints_do_not_pile_up():
    """Repeating the same hint costs no more memory than giving it once."""
    cache = make_cache(device_blocks=8)
    for now in range(5_000):
        serve(cache, make_path(1), "s", Hint(returns_in_s=3_000.0), now=float(now))

    assert len(cache._sessions._ends) < 1_100
    assert len(cache._sessions._dues) < 1_100
    assert cache.next_due_s == 4_999.0 + 3_000.0


def test_expected_sessions_come_in_the_order_of_their_time():
    """Each session is returned once; a session that returned or was closed is not expected any
    more."""
    cache = make_cache(device_blocks=16, hint_share=1.0)
    for name, in_s in (("late", 60.0), ("soon", 5.0), ("back", 6.0), ("closed", 7.0)):
        serve(cache, make_path(len(name), 20), name, Hint(returns_in_s=in_s))
    serve(cache, make_path(len("back"), 20), "back", now=1.0)
    cache.close_session(Namespace(), "closed")

    assert [known.name for known in cache.take_due_sessions(10.0)] == ["soon"]
    assert cache.take_due_sessions(10.0) == []
    assert cache.next_due_s == 60.0


def test_a_reset_forgets_sessions():
    """Lesson 59: after a reset no session from before it is known."""
    cache = make_cache(device_blocks=8)
    serve(cache, make_path(1), "s", PENDING)
    cache.reset()

    assert cache.stats().sessions[:2] == (0, 0)
    assert not cache.close_session(Namespace(), "s")


def test_the_path_of_a_session_is_found_from_where_it_ended():
    """The cached part of the session's path is found, even if its end was evicted."""
    cache = make_cache(device_blocks=8, hint_share=1.0)
    serve(cache, make_path(1, 2, 3, 4, 5, 6), "s", Hint(returns_in_s=1.0))
    (known,) = cache.take_due_sessions(2.0)

    assert cache.match_session(known).device_blocks == 6
    make_room(cache, 4)
    assert cache.match_session(known).device_blocks == 4
    assert len(cache.match_session(known).path.tokens) == 4 * BLOCK
    make_room(cache, 8)
    assert cache.match_session(known).num_blocks == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_an_evicted_block_is_found_in_the_tier_below(name):
    """With a lower tier, an evicted block moves there, under every policy: from the device to
    the host, from the host to storage."""
    cache = make_cache(
        device_blocks=8,
        host_blocks=8,
        storage=True,
        eviction=name,
        write_policy=WritePolicy.WRITE_BACK,
        write_ahead_blocks=8,
    )
    for first in (1, 2, 3):
        serve(cache, make_path(first, first + 10), f"s{first}")
    for _ in range(4):
        write_down(cache)
        cache.check()
    make_room(cache, 8)
    assert [blocks_by_tier(cache, make_path(n, n + 10)) for n in (1, 2, 3)] == [(0, 2, 0)] * 3

    cache.close_session(Namespace(), "s2")
    assert cache._evictor.evict_host(2) == 2
    cache.check()
    assert [blocks_by_tier(cache, make_path(n, n + 10)) for n in (1, 2, 3)] == [
        (0, 2, 0),
        (0, 0, 2),
        (0, 2, 0),
    ]


def test_closed_blocks_are_not_written_before_they_go():
    """With write_back the next victims are written, but blocks of closed sessions are not worth
    a copy."""
    cache = make_cache(
        device_blocks=8,
        host_blocks=8,
        write_policy=WritePolicy.WRITE_BACK,
        write_ahead_blocks=8,
    )
    serve(cache, make_path(1, 11), "open")
    serve(cache, make_path(2, 12), "closed", CLOSED)
    for _ in range(4):
        write_down(cache)
    make_room(cache, 8)

    assert blocks_by_tier(cache, make_path(1, 11)) == (0, 2, 0)
    assert blocks_by_tier(cache, make_path(2, 12)) == (0, 0, 0)
