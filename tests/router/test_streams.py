"""Streams through the router: forwarded as they come, and continued on another instance when
one breaks."""

import asyncio
import contextlib
import re
from typing import Any

import pytest

from headwater.server.app import create_app
from headwater.server.continuation import RETURNED, mark_line
from tests.router.harness import blocks, events, run, text_of

pytestmark = pytest.mark.slow


async def broken_stream(harness, path, body, *, how, others=1):
    """The text of a stream whose instance dies in the middle, while there are others."""
    one = harness.add()
    await harness.ready(one)
    async with harness.client.stream("POST", path, json=body) as answer:
        lines = answer.aiter_text()
        text = await anext(lines)
        one.engine.hold()
        for _ in range(others):
            harness.add()
        await harness.until(lambda known: len(known) == 1 + others)
        if how == "error":
            one.engine.die("out of memory")
        elif how == "stop":
            one.readiness.drain()
            one.service.is_stopping = True
            await one.engine.abort(None)
        else:
            await one.die()
        return text + "".join([piece async for piece in lines])


MANY = {"n": 3, "logprobs": 1, "presence_penalty": 0.5, "stop": ["q", "Qm"]}


@pytest.mark.parametrize("how", ["error", "stop", "kill"])
@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", MANY),
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", MANY | {"logprobs": True, "top_logprobs": 2}),
    ],
)
def test_a_broken_stream_continues_on_another_instance(path, extra, how):
    """The stream continues token by token, as if undisturbed, for any number of choices and
    options; internal marks never reach a client."""

    async def scenario(harness):
        body: dict[str, Any] = {"max_tokens": 300, "stream": True, "seed": 5} | extra
        body |= {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}

        text = await broken_stream(harness, path, body, how=how)
        whole = await harness.client.post(path, json=body)

        assert ": headwater" not in text
        assert text_of(events(text)) == text_of(events(whole.text))
        assert len({e["id"] for e in events(text)}) == 1

    run(scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_continued_stream_states_one_time_of_creation(path):
    """`created` is that of the first instance in every event, although each instance has its
    own clock."""

    async def scenario(harness):
        question = [{"role": "user", "content": "hello"}]
        body: dict[str, Any] = {"prompt": "hello", "messages": question, "input": "hello"}
        body |= {"stream": True, "seed": 5, "max_tokens": 100, "max_output_tokens": 100}
        one = harness.add(created_s=1.6e9)
        await harness.ready(one)
        async with harness.client.stream("POST", path, json=body) as answer:
            lines = answer.aiter_text()
            text = await anext(lines)
            one.engine.hold()
            harness.add(created_s=1.8e9)
            await harness.until(lambda known: len(known) == 2)
            await one.die()
            text += "".join([piece async for piece in lines])

        stated = re.findall(r'"created(?:_at)?":(\d+)', text)
        assert len(stated) > 2
        assert set(stated) == {"1600000000"}

    run(scenario)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_stream_without_a_last_event_is_passed_on_as_it_is(path):
    """The formats of these paths have no [DONE]. The end of such a stream is no failure of the
    instance."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        question = [{"role": "user", "content": "hello"}]
        body = {"messages": question, "input": "hello", "stream": True, "max_tokens": 9}

        text = (await harness.client.post(path, json=body)).text

        assert "[DONE]" not in text
        assert re.findall("^event: (.*)", text, re.MULTILINE)[-1] in (
            "message_stop",
            "response.incomplete",
        )
        assert (await harness.known())[one.name]["state"] == "ready"
        assert 'outcome="answered"} 1' in (await harness.client.get("/metrics")).text

    run(scenario)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_an_error_in_such_a_stream_has_the_format_of_its_client(path):
    """No instance can continue: the last event is a named error, and no [DONE] follows."""

    async def scenario(harness):
        question = [{"role": "user", "content": "hello"}]
        body = {"messages": question, "input": "hello", "stream": True, "max_tokens": 300}

        text = await broken_stream(harness, path, body, how="kill", others=0)

        *_, last = text.rstrip().split("\n\n")
        assert last.startswith('event: error\ndata: {"')
        assert "no other could continue" in last

    run(scenario)


def test_many_streams_go_on_at_once():
    """However many streams an instance had: each is continued once. That adds no load, so it
    does not use the retry budget, which is for requests that start again."""

    async def scenario(harness):
        one = harness.add(num_seqs=16)
        await harness.ready(one)
        body = {"prompt": "hello", "max_tokens": 60, "stream": True}
        async with contextlib.AsyncExitStack() as streams:
            one.engine.hold()
            starting = [
                asyncio.create_task(
                    streams.enter_async_context(
                        harness.client.stream(
                            "POST", "/v1/completions", json=body | {"seed": seed}
                        )
                    )
                )
                for seed in range(16)
            ]
            await one.until_alive(16)
            one.engine.flow()
            answers = [(await task).aiter_text() for task in starting]
            one.engine.hold()
            await harness.ready(harness.add(num_seqs=16))
            await one.die()
            texts = ["".join([piece async for piece in answer]) for answer in answers]
        for seed, text in enumerate(texts):
            whole = await harness.client.post("/v1/completions", json=body | {"seed": seed})
            assert text_of(events(text)) == text_of(events(whole.text))
        metrics = (await harness.client.get("/metrics")).text
        taken_up = re.search(r'router_failures_total{.*reason="broken"} (\d+)', metrics)
        assert taken_up is not None
        assert int(taken_up.group(1)) > 10

    run(scenario)


def test_a_stream_that_no_instance_can_continue_ends_with_a_typed_error():
    """Lesson 53: tokens were streamed and no instance is left to continue; the client gets one
    error in the stream."""

    async def scenario(harness):
        body = {"prompt": "hello", "max_tokens": 300, "stream": True}

        text = await broken_stream(harness, "/v1/completions", body, how="kill", others=0)

        *before, last = events(text)
        assert last["error"]["code"] == "instance_lost"
        assert before[0]["choices"]
        assert all(event["choices"][0]["finish_reason"] is None for event in before)

    run(scenario)


class GivingBack:
    """An instance that has no room to continue after a few events, `times` in a row."""

    def __init__(self, app, times):
        self._app = app
        self._left = times

    async def __call__(self, scope, receive, send):
        if scope["path"] != "/v1/completions":
            await self._app(scope, receive, send)
            return
        gives_back, self._left, num_bodies = self._left > 0, self._left - 1, 0

        async def limited(message):
            nonlocal num_bodies
            num_bodies += message["type"] == "http.response.body"
            if gives_back and num_bodies == 3:
                message = message | {"body": mark_line(RETURNED) + b"data: {}\n\n"}
            await send(message)

        await self._app(scope, receive, limited)


@pytest.mark.parametrize(("times", "num_instances"), [(1, 2), (7, 1)])
def test_a_returned_request_continues(times, num_instances):
    """Lesson 55: the request continues on another instance, or on the same one if there is no
    other, as long as it makes progress; the instance has not failed and gets other requests."""

    async def scenario(harness):
        instances = [harness.add() for _ in range(num_instances)]
        await harness.ready(*instances)
        body = {"prompt": "hello " * 20, "max_tokens": 60, "stream": True, "seed": 5}
        whole = await harness.client.post("/v1/completions", json=body)
        await harness.until(lambda known: blocks(known) > 6)
        home = next(i for i in instances if i.name == whole.headers["x-headwater-instance"])
        home.readiness.open(GivingBack(create_app(home.service), times))

        answer = await harness.client.post("/v1/completions", json=body)

        assert text_of(events(answer.text)) == text_of(events(whole.text))
        assert (await harness.known())[home.name]["state"] == "ready"
        metrics = (await harness.client.get("/metrics")).text
        assert f'reason="returned"}} {float(times)}' in metrics

    run(scenario)


def test_events_are_passed_on_as_they_come():
    """Nothing is buffered: the first event arrives while the engine stands still."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        body = {"prompt": "hello", "max_tokens": 8, "stream": True, "ignore_eos": True}
        async with harness.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_text()
            text = await anext(lines)
            one.engine.hold()
            known = await harness.known()
            assert known[one.name]["num_alive"] == 1
            assert known[one.name]["outstanding_tokens"] == 0
            one.engine.flow()
            text += "".join([piece async for piece in lines])
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"

    run(scenario)


def test_a_disconnected_client_ends_its_request_at_the_instance():
    """Lesson 58: no instance generates for a client that is gone."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        one.engine.hold()
        waiting = asyncio.create_task(harness.complete(max_tokens=200))
        await one.until_alive(1)
        waiting.cancel()
        await one.until_alive(0)
        one.engine.flow()
        assert (await harness.complete()).status_code == 200

    run(scenario)
