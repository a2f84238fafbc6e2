"""POST /v1/reload_weights where it is not possible, over an echo engine."""

import asyncio

from headwater.engine.client import GetStats
from tests.server.harness import error, run


def test_an_engine_that_cannot_reload_refuses_and_continues():
    """The call is refused with a message; admission continues as before."""

    async def scenario(harness):
        found = error(await harness.post("/v1/reload_weights"), 400)
        assert "cannot reload weights" in found["message"]
        assert not (await harness.engine.control(GetStats())).is_paused
        assert (await harness.complete()).status_code == 200

    run(scenario)


def test_folders_that_were_not_offered_are_refused():
    """Only folders beside the one given at start are accepted, and fields have limits."""

    async def scenario(harness):
        answer = await harness.post("/v1/reload_weights", {"model": "/etc"})
        assert error(answer, 400)["param"] == "model"
        error(await harness.post("/v1/reload_weights", {"drain_timeout_s": -1}), 400)
        error(await harness.post("/v1/reload_weights", {"drain_timeout_s": 1e9}), 400)

    run(scenario)


def test_behind_a_router_weights_are_not_changed():
    """The router knows its instances by fingerprint."""

    async def scenario(harness):
        assert "router" in error(await harness.post("/v1/reload_weights"), 400)["message"]

    run(scenario, routers=("http://127.0.0.1:1",))


def test_two_reloads_at_once_are_one_and_a_refusal():
    """The second reload is refused because the first is running, and the pause of the first is
    unchanged."""

    async def scenario(harness):
        harness.engine.core.allow_reload(lambda folder: harness.engine.info)
        harness.engine.hold()
        running = asyncio.create_task(harness.complete(max_tokens=4))
        await harness.until_waiting(1)
        harness.engine.core.step()
        first = asyncio.create_task(harness.post("/v1/reload_weights", {"drain_timeout_s": 30}))
        await harness.until(harness.service.reloading.locked)
        found = error(await harness.post("/v1/reload_weights"), 503)
        assert found["code"] == "reloading"
        harness.engine.flow()
        assert (await running).status_code == 200
        assert (await first).json()["changed"] is False

    run(scenario)


def test_a_reload_that_cannot_drain_is_refused_and_changes_nothing():
    """The answer is a 503 with a code for clients; an earlier pause stays."""

    async def scenario(harness):
        harness.engine.core.allow_reload(lambda folder: harness.engine.info)
        harness.engine.hold()
        running = asyncio.create_task(harness.complete(max_tokens=4))
        await harness.until_waiting(1)
        harness.engine.core.step()
        await harness.post("/v1/pause")
        late = asyncio.create_task(harness.post("/v1/reload_weights", {"drain_timeout_s": 0}))
        await harness.until(harness.service.reloading.locked)
        harness.engine.flow()
        assert error(await late, 503)["code"] == "not_drained"
        assert (await running).status_code == 200
        assert (await harness.engine.control(GetStats())).is_paused

    run(scenario)
