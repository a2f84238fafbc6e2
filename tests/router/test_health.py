"""Instances that die, hang, drain and return: which of them get requests."""

import asyncio

import pytest

from headwater.clock import VirtualClock
from headwater.server.router.config import RouterConfig
from tests.router.harness import QUICK_LOSS, HangingEngine, events, run, text_of
from tests.router.registrations import make_registration, make_registry

pytestmark = pytest.mark.slow


def test_a_dead_instance_is_not_noticed_by_clients():
    """Retries go to other instances; the dead one is soon removed, and its cache is not
    used."""

    async def scenario(harness):
        one, two = harness.add(), harness.add()
        await harness.ready(one, two)
        first = await harness.complete()
        home = one if first.headers["x-headwater-instance"] == one.name else two

        await home.die()

        answer = await harness.complete()
        assert answer.status_code == 200
        assert answer.json()["choices"] == first.json()["choices"]
        await harness.until(lambda known: set(known) == {one.name, two.name} - {home.name})
        assert (await harness.client.get("/health")).status_code == 200

    run(scenario, **QUICK_LOSS)


def test_an_instance_that_hangs_loses_its_requests():
    """Lesson 52: an instance that does not respond blocks no request. Without heartbeats for
    too long, its requests are computed elsewhere, within a bound."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        one.engine.hold()
        waiting = asyncio.create_task(harness.complete())
        await one.until_alive(1)
        one.membership.cancel()
        two = harness.add()

        answer = await waiting

        assert answer.status_code == 200
        assert answer.headers["x-headwater-instance"] == two.name
        one.engine.flow()

    run(scenario, **QUICK_LOSS)


def test_an_instance_whose_engine_hangs_does_not_count_as_alive():
    """Lesson 52: the HTTP server of the instance still answers, but that does not count; a
    stream continues elsewhere, and the instance returns with its engine."""

    async def scenario(harness):
        one = harness.add(engine=HangingEngine, silent_s=0.3)
        await harness.ready(one)
        body = {"prompt": "hello", "max_tokens": 300, "stream": True, "seed": 5}
        async with harness.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_text()
            text = await anext(pieces)
            one.engine.hold()
            two = harness.add()
            text += "".join([piece async for piece in pieces])
        assert two.name in await harness.known()
        one.engine.flow()
        await harness.ready(one)
        whole = await harness.client.post("/v1/completions", json=body)

        assert text_of(events(text)) == text_of(events(whole.text))

    run(scenario, **QUICK_LOSS)


def test_a_draining_instance_gets_nothing_new():
    """Lesson 59: a draining instance finishes its requests; heartbeats do not make it ready
    again, but a restart does."""

    async def scenario(harness):
        one, two = harness.add(), harness.add()
        await harness.ready(one, two)
        await one.memberships.leave()

        names = {(await harness.complete()).headers["x-headwater-instance"] for _ in range(6)}

        assert names == {two.name}
        assert (await harness.known())[one.name]["state"] == "draining"
        await two.memberships.leave()
        answer = await harness.complete()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_instance"
        assert (await harness.client.get("/health")).status_code == 503

    run(scenario)


def test_a_router_that_starts_late_learns_which_instances_drain():
    """Lesson 59: an instance that is draining registers as such, for its running requests."""

    async def scenario(harness):
        one, two = harness.add(), harness.add()
        one.service.is_stopping = True

        await harness.until(lambda known: known.get(one.name, {}).get("state") == "draining")
        await harness.ready(one, two)

        names = {(await harness.complete()).headers["x-headwater-instance"] for _ in range(4)}
        assert names == {two.name}

    run(scenario)


def test_a_restarted_instance_counts_as_a_new_one():
    """Lesson 71: with a new epoch the earlier view is dropped."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        await harness.complete()
        await harness.until(lambda known: known[one.name]["known_blocks"] > 0)
        port = one.listener.getsockname()[1]
        await one.die()

        again = harness.add(epoch="2", port=port)
        known = await harness.until(lambda known: known[again.name]["epoch"] == "2")
        assert known[again.name]["known_blocks"] == 0
        await harness.ready(again)
        assert (await harness.complete()).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ] == 0

    run(scenario)


def test_instances_that_are_lost_and_return_are_logged(caplog):
    """There is one line when an instance registers, one when it is lost, and one when it is
    back."""
    caplog.set_level("INFO", logger="headwater.server.router")
    clock = VirtualClock()
    config = RouterConfig(peer_token="t" * 32)
    registry = make_registry(clock, config)
    told = make_registration()

    def sweep(seconds):
        for _ in range(round(seconds / config.sweep_s)):
            clock.advance(config.sweep_s)
            registry.expire()

    registry.register(told)
    sweep(config.stale_s + 0.5)
    registry.register(told)
    sweep(config.forget_s + 0.5)

    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "instance registered",
        "instance lost",
        "instance is back",
        "instance lost",
        "instance removed, no heartbeat",
    ]


def test_a_router_that_was_paused_does_not_lose_its_instances(caplog):
    """A paused router could not receive heartbeats: only silence while it ran counts."""
    clock = VirtualClock()
    config = RouterConfig(peer_token="t" * 32)
    registry = make_registry(clock, config)
    told = make_registration()
    registry.register(told)
    registry.expire()
    clock.advance(60.0)

    registry.expire()

    assert [entry.name for entry in registry.ready({"mixed"})] == ["one"]
    assert "router was paused: paused_s=59.8" in caplog.text


def test_a_lost_instance_is_listed_until_it_returns_or_is_old(caplog):
    """A silent instance is listed for ten minutes; one that drained, or is back, is not, and the
    end of a drained one is no warning."""
    clock = VirtualClock()
    registry = make_registry(clock)

    def register(name, port):
        registry.register(make_registration(name, port=port))

    for port, name in enumerate(("one", "two", "three"), start=1):
        register(name, port)
    registry.drain("three")
    for _ in range(100):
        clock.advance(0.25)
        registry.expire()

    assert sorted(entry.name for entry in registry.lost) == ["one", "two"]
    assert "instance removed, no heartbeat: name=one" in caplog.text
    warnings = [
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    ]
    assert not any("name=three" in line for line in warnings), (
        "it drained before it was removed"
    )
    assert registry.is_away("e")
    register("one", 1)
    assert [entry.name for entry in registry.lost] == ["two"]
    clock.advance(600.0)
    assert registry.lost == []
    assert not registry.is_away("e")


def test_a_stream_that_arrives_is_a_sign_of_life():
    """Heartbeats may be late on a busy machine; an instance that streams is not lost."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        body = {"prompt": "hello", "max_tokens": 300, "stream": True, "seed": 5}
        async with harness.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            one.membership.cancel()
            one.engine.hold()
            await harness.until(lambda known: known[one.name]["seen_s_ago"] > 0.5)
            one.engine.flow()
            await anext(pieces)
            await harness.until(lambda known: known[one.name]["seen_s_ago"] < 0.5)
            async for _ in pieces:
                pass

    run(scenario)
