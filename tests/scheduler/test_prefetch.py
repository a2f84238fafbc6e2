"""Sessions with an announced return are on the device in time, unless other requests need the
room."""

from dataclasses import replace

import pytest

from headwater.cache import Hint, LoadJob
from headwater.clock import VirtualClock
from headwater.testing.tiers import EchoTiers, make_echo_request
from headwater.types import WritePolicy
from tests.scheduler.harness import make_storage

PROMPT = list(range(1, 25))
"""Six blocks."""


def make_engine(**changes):
    settings = {"load_policy": "wait", **changes.pop("settings", {})}
    options = {"num_blocks": 16, "host_blocks": 64, "clock": VirtualClock(), "threads": False}
    return EchoTiers(**{**options, **changes}, settings=settings)


def ask(engine, name, tokens, **fields):
    request = make_echo_request(name, tokens, max_tokens=1)
    engine.run(replace(request, **fields), within_s=10)
    settle(engine)


def settle(engine):
    """Turn the loop until it has nothing to do now."""
    while engine.core.has_work:
        engine.step()


def park(engine, in_s=10.0):
    """Serve a session that announces its return in `in_s`, and others that evict it from the
    device."""
    hint = Hint(returns_in_s=in_s)
    ask(engine, "first", PROMPT, session_id="s", cache_hint=hint)
    for other in range(4):
        ask(engine, f"other{other}", [30 + other] * 24)
    assert on_device(engine) < 6


def on_device(engine):
    (known,) = engine.cache._sessions._entries.values()
    return engine.cache.match_session(known).device_blocks


def num_loads(engine):
    return sum(isinstance(plan, LoadJob) for plan in engine.copier.started)


def move_to(engine, at_s):
    engine.clock.advance(at_s - engine.clock.now())
    settle(engine)


def test_a_parked_session_is_back_when_it_is_expected():
    """Blocks of the session are loaded from the host two seconds before its time, so its next
    turn does not wait."""
    engine = make_engine()
    park(engine)
    move_to(engine, 7.9)
    assert on_device(engine) < 6
    move_to(engine, 8.1)
    assert on_device(engine) == 6
    ask(engine, "second", [*PROMPT, 1, 2, 3, 4], session_id="s")

    assert engine.usages["second"].by_tier["device"] == 24
    assert engine.usages["second"].by_tier["host"] == 0
    engine.check_idle()


def test_an_idle_engine_sleeps_until_a_session_is_due():
    """The loop gets a wake-up time and is not busy meanwhile."""
    engine = make_engine()
    park(engine)

    assert not engine.core.has_work
    assert engine.core.sleep_s() == pytest.approx(8.0 - engine.clock.now())
    move_to(engine, 8.0)
    assert engine.core.sleep_s() is None


def test_a_session_comes_up_from_storage_in_two_steps():
    """The session is loaded from storage to the host and then to the device, without a
    request."""
    engine = make_engine(host_blocks=8, storage=make_storage(4))
    park(engine)
    move_to(engine, 8.1)

    assert on_device(engine) == 6
    engine.check_idle()


def test_nothing_is_prefetched_for_a_closed_session():
    """A session that was closed, or has already returned, is not expected any more."""
    engine = make_engine()
    park(engine)
    engine.core.close_session("s", "")

    assert engine.core.sleep_s() is None
    move_to(engine, 8.1)
    assert num_loads(engine) == 0


def test_a_setting_turns_prefetching_off():
    """With the setting off, hints still count for eviction, but cause no loads."""
    engine = make_engine(settings={"prefetch_sessions": False})
    park(engine)
    move_to(engine, 11.0)

    assert on_device(engine) < 6
    assert num_loads(engine) == 0


def test_nothing_is_prefetched_while_a_sequence_waits_for_slots():
    """Waiting requests come before expected sessions. The session is tried again until its
    time, and finds its blocks on the host if there was never room."""
    engine = make_engine(settings={"max_num_seqs": 1})
    park(engine)
    engine.clock.advance(8.1 - engine.clock.now())
    running = make_echo_request("running", [50] * 40, max_tokens=8)
    waiting = make_echo_request("waiting", [51] * 40, max_tokens=8)
    for request in (running, waiting):
        engine.core.add(request)
    while "running" not in engine.reasons:
        engine.step()
        assert num_loads(engine) == 0
    settle(engine)
    engine.clock.advance(0.3)
    settle(engine)

    assert on_device(engine) == 6
    engine.check_idle()


def test_prefetches_in_flight_are_bounded():
    """At most an eighth of the device's blocks is prefetched at once; a longer session comes in
    parts."""
    engine = make_engine(num_blocks=24, held=True, write_policy=WritePolicy.WRITE_THROUGH)
    hint = Hint(returns_in_s=10.0)
    engine.core.add(
        replace(
            make_echo_request("first", PROMPT, max_tokens=1), session_id="s", cache_hint=hint
        )
    )
    turn_and_copy(engine)
    for other in range(6):
        engine.core.add(make_echo_request(f"o{other}", [30 + other] * 24, max_tokens=1))
        turn_and_copy(engine)
    assert on_device(engine) == 0
    engine.clock.advance(8.1 - engine.clock.now())
    settle(engine)

    assert [plan.num_blocks for plan, _ in engine.copier.pending.values()] == [3]
    turn_and_copy(engine)
    assert on_device(engine) == 6


def turn_and_copy(engine):
    """Run until nothing is to be done, with every copy executed."""
    while engine.core.has_work or engine.scheduler.num_copies:
        settle(engine)
        for job in list(engine.copier.pending):
            engine.copier.finish(job)


def test_a_load_that_fails_leaves_the_session_where_it_is():
    """Lesson 24: nothing is retried for ever, and the next turn is served in any case."""
    engine = make_engine(held=True)
    engine.core.add(
        replace(
            make_echo_request("first", PROMPT, max_tokens=1),
            session_id="s",
            cache_hint=Hint(returns_in_s=10.0),
        )
    )
    turn_and_copy(engine)
    for other in range(4):
        engine.core.add(make_echo_request(f"o{other}", [30 + other] * 24, max_tokens=1))
        turn_and_copy(engine)
    engine.clock.advance(8.1 - engine.clock.now())
    settle(engine)
    (job,) = engine.copier.pending
    engine.copier.finish(job, 0)
    settle(engine)

    assert engine.scheduler.num_copies == 0
    assert engine.core.sleep_s() is None
    engine.check_idle()
