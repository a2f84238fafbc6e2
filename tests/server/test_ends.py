"""Requests that end before their answer is complete: aborts, clients that disconnect, engines
that die."""

import asyncio

import pytest

from headwater.engine.client import GetStats
from tests.server.harness import completion_scope, error, events, run


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_is_reported_to_the_client(stream):
    """Lesson 58: after an abort by request id, the client gets a 499 or the last chunk of a
    stream."""

    async def scenario(harness):
        harness.engine.hold()
        waiting = asyncio.create_task(harness.complete(request_id="mine", n=2, stream=stream))
        await harness.until_waiting(2)
        unknown = await harness.post("/v1/abort_requests", {"request_ids": ["other"]})
        assert unknown.json() == {"aborted": 0}
        aborted = await harness.post("/v1/abort_requests", {"request_ids": ["cmpl-mine"]})
        assert aborted.json() == {"aborted": 2}
        response = await waiting
        if stream:
            reasons = [c["choices"][0]["finish_reason"] for c in events(response)]
            assert reasons == ["abort", "abort"]
        else:
            assert error(response, 499)["code"] == "aborted"
        harness.engine.flow()
        assert (await harness.complete()).status_code == 200

    run(scenario)


@pytest.mark.parametrize("name", ["cmpl-1", "chatcmpl-1", "chatcmpl-cmpl-1"])
def test_a_name_that_looks_like_an_answers_id_can_be_aborted(name):
    """The request can be aborted by the client's own id of it, or by the id of its answer."""

    async def scenario(harness):
        harness.engine.hold()
        for given in (name, f"cmpl-{name}"):
            waiting = asyncio.create_task(harness.complete(request_id=name))
            await harness.until_waiting(1)
            aborted = await harness.post("/v1/abort_requests", {"request_ids": [given]})
            assert aborted.json() == {"aborted": 1}
            error(await waiting, 499)

    run(scenario)


def test_request_ids_are_echoed_and_may_be_used_twice():
    """A client's own id is returned in the header and the body; two requests may share one."""

    async def scenario(harness):
        responses = await asyncio.gather(
            *(harness.complete(request_id="same") for _ in range(2)),
            harness.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "head"}),
        )
        assert [r.json()["id"] for r in responses] == ["cmpl-same", "cmpl-same", "cmpl-head"]
        assert [r.headers["x-request-id"] for r in responses] == ["same", "same", "head"]

    run(scenario)


@pytest.mark.parametrize("num_streamed", [0, 3])
def test_the_request_of_a_disconnected_client_is_aborted(num_streamed):
    """Lesson 58: a closed connection ends the work and returns every slot."""

    async def scenario(harness):
        gone = asyncio.Event()
        sent = []
        body = b'{"prompt": "hello", "max_tokens": 400, "stream": %s}' % (
            b"true" if num_streamed else b"false"
        )
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if incoming:
                return incoming.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) > num_streamed:
                gone.set()

        if not num_streamed:
            harness.engine.hold()
        exchange = asyncio.create_task(harness.readiness(completion_scope(), receive, send))
        if not num_streamed:
            await harness.until_live(1)
            gone.set()
        await exchange
        harness.engine.flow()
        await harness.until_idle()
        assert await harness.all_free()
        assert (await harness.engine.control(GetStats())).num_running == 0

    run(scenario)


def test_clients_learn_at_once_that_the_engine_died():
    """Waiting clients get a 503, or an error event if a stream has begun; so does /health."""

    async def scenario(harness):
        harness.engine.hold()
        waiting = [asyncio.create_task(harness.complete()) for _ in range(2)]
        await harness.until_live(2)
        harness.engine.die("the engine process ended with signal 9")
        for task in waiting:
            assert error(await task, 503)["code"] == "engine_dead"
        assert "signal 9" in error(await harness.client.get("/health"), 503)["message"]
        error(await harness.complete(stream=True), 503)
        assert (await harness.client.get("/metrics")).status_code == 200

    run(scenario)


def test_an_error_in_a_begun_stream_is_an_event():
    """The status was already sent; the client gets the failure inside the stream."""

    async def scenario(harness):
        async def die_later():
            await harness.until(lambda: harness.engine.core.stats().num_steps >= 3)
            harness.engine.die("gone")

        task = asyncio.create_task(die_later())
        response = await harness.complete(stream=True, max_tokens=400)
        await task
        chunks = events(response)
        assert response.status_code == 200
        assert chunks[-1]["error"]["code"] == "engine_dead"
        assert "choices" in chunks[0]

    run(scenario)
