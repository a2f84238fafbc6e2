"""Large bodies are parsed elsewhere: other requests go on meanwhile."""

import asyncio
import json
import time

import numpy as np
import pytest

from headwater.server.body import INLINE_BYTES
from headwater.server.body_parser import BodyParser
from headwater.server.config import LimitsConfig
from headwater.server.errors import RequestRefused
from headwater.server.router.prompt_fields import FieldReader, prompt_fields
from headwater.server.router.stream_progress import StreamProgress
from headwater.server.schema import ChatRequest, CompletionRequest
from tests.router.harness import run as run_router
from tests.server.harness import error, run

IDS = b'{"prompt":[' + b",".join([b"65"] * 4_000_000) + b'],"max_tokens":1}'
RESUMED = (
    b'{"prompt":"hi","max_tokens":1,"stream":true,"continue_choices":[{"has_ended":true,'
    b'"token_ids":[' + b",".join([b"65"] * 4_000_000) + b"]}]}"
)
LISTS = b'{"prompt":"hi","response_format":[' + b",".join([b"[]"] * 4_000_000) + b"]}"
TEXT = json.dumps({"prompt": "a, " * 4_000_000}).encode()


async def parse(raw, kind, **settings):
    parser = BodyParser(**settings)
    try:
        return await parser.parse(raw, kind)
    finally:
        parser.close()


@pytest.mark.parametrize(
    ("body", "path"),
    [(IDS, "/v1/completions"), (RESUMED, "/v1/completions"), (LISTS, "/v1/completions")],
    ids=["token ids", "resumed output", "empty lists"],
)
def test_a_body_of_megabytes_does_not_stop_the_event_loop(body, path):
    """Lesson 81: the loop turns while the body is parsed; the body itself is a 400."""
    turns: list[None] = []

    async def turn():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def scenario(harness):
        await harness.complete()
        turning = asyncio.create_task(turn())
        cpu_s = time.thread_time()
        answer = await harness.client.post(path, content=body)
        cpu_s = time.thread_time() - cpu_s
        turning.cancel()
        error(answer, 400)
        assert len(turns) > 100
        # Parsing these bodies in place takes seconds of this thread's time.
        assert cpu_s < max(0.5, len(turns) * 1e-3)

    run(scenario, limits=LimitsConfig(max_body_bytes=64 << 20))


def test_a_long_text_is_read_whole():
    """Commas in a text are no values."""
    body = asyncio.run(parse(TEXT, CompletionRequest))
    assert body.prompt == "a, " * 4_000_000


def test_token_ids_come_back_as_they_were():
    """One list, several lists, and resumed output."""
    ids = list(range(200_000))
    flat = json.dumps({"prompt": ids}).encode()
    nested = json.dumps(
        {"prompt": [ids, ids[::-1]], "continue_choices": [{"token_ids": ids, "seed": 3}]}
    ).encode()
    assert min(len(flat), len(nested)) > INLINE_BYTES

    assert asyncio.run(parse(flat, CompletionRequest)).prompt == ids
    body = asyncio.run(parse(nested, CompletionRequest))
    assert body.prompt == [ids, ids[::-1]]
    assert body.continue_choices[0].token_ids == ids
    assert body.continue_choices[0].seed == 3


IDS_AND = b'{"prompt":[' + b"1," * 300_000
WRONG = {
    "a text among ids": (IDS_AND + b'"x"]}', "prompt must be"),
    "a negative id": (IDS_AND + b"-1]}", "token id is negative"),
    "too many ids": (IDS_AND + b"1" + b",1" * 800_000 + b"]}", "the limit is 1000000"),
    "nested": (b'{"prompt":' + b"[" * 600_000, "Expected `int`"),
    "spaces": (b" " * 600_000, "not JSON"),
    "a field": (b'{"prompt":"' + b"x" * 600_000 + b'","top_p":7}', "top_p"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_large_body_is_said(case):
    """The same sentences as for a small one, and the limits."""
    raw, words = WRONG[case]
    with pytest.raises(RequestRefused, match=words):
        asyncio.run(parse(raw, CompletionRequest, max_ids=1_000_000))


def test_a_large_body_has_a_limit_of_values():
    """A million empty objects are not text and not tokens."""
    raw = b'{"messages":[{"role":"user"}],"chat_template_kwargs":{"a":['
    raw += b"{}," * 300_000 + b"{}]}}"
    with pytest.raises(RequestRefused, match="more than 200000 values"):
        asyncio.run(parse(raw, ChatRequest))


def test_a_cancelled_request_leaves_no_half_read_worker():
    """The next body is not answered with the result of the one before."""

    async def scenario():
        parser = BodyParser()
        big = json.dumps({"messages": [{"role": "user", "content": "x" * 9_000_000}]}).encode()
        first = asyncio.create_task(parser.parse(big, ChatRequest))
        await asyncio.sleep(0.05)
        first.cancel()
        body = await parser.parse(big.replace(b"x", b"y"), ChatRequest)
        assert body.messages[0].content == "y" * 9_000_000
        parser.close()

    asyncio.run(scenario())


def test_the_length_of_finished_choices_is_checked():
    """`has_ended` does not let more tokens in than `max_tokens`, nor ids of no token."""

    async def scenario(harness):
        for ids in ([65] * 9, [1 << 30]):
            entry = {"has_ended": True, "token_ids": ids}
            answer = await harness.complete(stream=True, max_tokens=8, continue_choices=[entry])
            assert error(answer, 400)["param"] == "continue_choices"

    run(scenario)


def test_a_stream_is_resumed_without_parsing_its_body_again():
    """The field is added to the text; a parser takes the last of two."""
    progress = StreamProgress()
    progress.strip(b': headwater {"tokens":[7],"seed":1}\ndata: {}\n\n')

    for raw in (b'{"prompt": "x"}', b' {"prompt": "x" } \n', b"{}"):
        added = json.loads(progress.body(raw))["continue_choices"]
        assert added == [{"token_ids": [7], "seed": 1, "has_ended": False}]
    again = b'{"prompt":"x","continue_choices":[{"token_ids":[5],"seed":1}]}'
    assert json.loads(progress.body(again))["continue_choices"][0]["token_ids"] == [5, 7]


def test_a_router_reads_long_bodies_in_another_process():
    """The event loop's thread works a small part of the time that parsing takes."""
    message = {"role": "user", "content": "hello " * 30}
    raw = json.dumps({"messages": [message] * 60_000}).encode()
    path = "/v1/chat/completions"

    async def scenario():
        reader = FieldReader()
        await reader.read(path, raw, 1 << 20)  # starts the worker
        cpu_s = time.thread_time()
        fields = await reader.read(path, raw, 1 << 20)
        cpu_s = time.thread_time() - cpu_s
        reader.close()
        return fields, cpu_s

    begin_s = time.thread_time()
    expected = prompt_fields(path, raw, 1 << 20)
    inline_s = time.thread_time() - begin_s
    fields, cpu_s = asyncio.run(scenario())

    assert fields == expected
    assert fields.text == b""  # longer than the limit: it is not sent to the router
    assert cpu_s < 0.3 * inline_s


def test_a_router_hashes_no_prompt_that_is_longer_than_any_context():
    """Neither a text nor token ids: the instance refuses them."""
    fits = prompt_fields("/v1/completions", b'{"prompt": [1, 2, 3]}', 64 * 16)
    long = json.dumps({"prompt": [1] * 65}).encode()

    assert fits.token_ids == np.array([1, 2, 3], dtype=np.int32).tobytes()
    assert prompt_fields("/v1/completions", long, 64 * 16).token_ids == b""
    text = json.dumps({"prompt": "x" * 1100}).encode()
    assert prompt_fields("/v1/completions", text, 64 * 16).text == b""


def test_a_text_that_no_instance_can_take_is_not_tokenized_for_routing():
    """The router sends it on by load, and the instance refuses it unread."""

    async def scenario(harness):
        instance, paths = harness.add(), []
        await harness.ready(instance)
        app = instance.readiness._app

        async def watch(scope, receive, send):
            paths.append(scope["path"])
            await app(scope, receive, send)

        instance.readiness.open(watch)
        answer = await harness.complete(prompt="word " * 10_000)
        assert answer.status_code == 400
        assert paths == ["/v1/completions"]

    run_router(scenario)
