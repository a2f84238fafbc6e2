"""Large bodies are parsed in another process: other requests continue."""

import asyncio
import json
import sys
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.engine import structured
from headwater.errors import RequestError
from headwater.server import body_limits, messages_request, worker_pool
from headwater.server.body import INLINE_BYTES, is_short
from headwater.server.body_limits import MAX_FIELD_BYTES
from headwater.server.body_parser import BodyParser
from headwater.server.config import LimitsConfig
from headwater.server.errors import RequestRefused
from headwater.server.messages_schema import CountTokensRequest
from headwater.server.params import check_prompt_logprobs, conversation_start
from headwater.server.responses_schema import ResponsesRequest
from headwater.server.router.prompt_fields import FieldReader, prompt_fields
from headwater.server.router.stream_progress import StreamProgress
from headwater.server.schema import ChatRequest, CompletionRequest, Message, TextPart
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
    """Lesson 81: the loop continues while the body is parsed; the body itself gets a 400."""
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
    """Commas in a text are not values."""
    body = asyncio.run(parse(TEXT, CompletionRequest))
    assert body.prompt == "a, " * 4_000_000


def test_token_ids_come_back_as_they_were():
    """Token ids are unchanged in one list, in several lists, and in resumed output."""
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
    "a negative id": (IDS_AND + b"-1]}", "at least 0 and below 2\\^31, got -1"),
    "too many ids": (IDS_AND + b"1" + b",1" * 800_000 + b"]}", "the limit is 1000000"),
    "nested": (b'{"prompt":' + b"[" * 600_000, "more than 200000 values"),
    "spaces": (b" " * 600_000, "not JSON"),
    "a field": (b'{"prompt":"' + b"x" * 600_000 + b'","top_p":7}', "top_p"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_large_body_gets_a_message(case):
    """The messages are those for a small body, and those about the limits."""
    raw, words = WRONG[case]
    with pytest.raises(RequestRefused, match=words):
        asyncio.run(parse(raw, CompletionRequest, max_ids=1_000_000))


def test_a_large_body_has_a_limit_of_values():
    """The limit holds for empty objects and for short texts."""
    raw = b'{"messages":[{"role":"user"}],"chat_template_kwargs":{"a":['
    raw += b"{}," * 300_000 + b"{}]}}"
    texts = json.dumps({"messages": [{"role": "user"}], "stop": ["a"] * 300_000}).encode()
    for body in (raw, texts):
        with pytest.raises(RequestRefused, match="more than 200000 values"):
            asyncio.run(parse(body, ChatRequest))


LONG = "x" * INLINE_BYTES
ABOVE: dict[str, dict[str, Any]] = {
    "tools": {"tools": [{"function": {"name": "f", "description": "x" * MAX_FIELD_BYTES}}]},
    "a pattern": {"guided_regex": "x" * MAX_FIELD_BYTES},
    "settings": {"chat_template_kwargs": {"a": [1] * MAX_FIELD_BYTES}},
}


@pytest.mark.parametrize("case", ABOVE)
def test_only_prompts_are_long(case):
    """Fields that are written as JSON again, or read by the event loop, have a limit."""
    raw = json.dumps({"messages": [{"role": "user", "content": LONG}]} | ABOVE[case]).encode()
    with pytest.raises(RequestRefused, match=f"the limit is {MAX_FIELD_BYTES}"):
        asyncio.run(parse(raw, ChatRequest))


def test_the_arguments_of_calls_count_as_values():
    """Arguments are JSON inside a text, and are parsed when the prompt is made."""
    arguments = "[" + "[]," * 150_000 + "1]"
    call = {"function": {"name": "f", "arguments": arguments}}
    chat = {"messages": [{"role": "assistant", "tool_calls": [call]}] * 2}
    item = {"type": "function_call", "name": "f", "arguments": arguments}
    for body, kind in ((chat, ChatRequest), ({"input": [item] * 2}, ResponsesRequest)):
        with pytest.raises(RequestRefused, match="more than 200000 values"):
            asyncio.run(parse(json.dumps(body).encode(), kind))
    short = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], "content": LONG}
    ]
    asyncio.run(parse(json.dumps({"messages": short}).encode(), ChatRequest))


def test_a_body_of_lists_is_refused_unparsed(monkeypatch):
    """Millions of lists take many seconds to parse, so values are counted in the text first."""
    monkeypatch.setattr(body_limits, "decode_json", lambda raw, kind: pytest.fail("parsed"))
    for raw in (LISTS, b'{"a":' + b'["\\"[",' * 300_000):
        with pytest.raises(RequestRefused, match="more than 200000 values"):
            body_limits.decode_long_json(raw, ChatRequest)


def test_a_short_body_of_many_lists_is_parsed_elsewhere():
    """The body is below the length for the event loop, but takes tens of milliseconds to
    parse."""
    raw = (
        b'{"messages":[{"role":"user"}],"chat_template_kwargs":{"a":['
        + b"[]," * 30_000
        + b"1]}}"
    )
    assert len(raw) < INLINE_BYTES
    assert not is_short(raw)
    body = asyncio.run(parse(raw, ChatRequest))
    assert len(body.chat_template_kwargs["a"]) == 30_001


def test_brackets_in_texts_are_not_counted(monkeypatch):
    """A text of code is one value; a text without an end is left to the parser."""
    monkeypatch.setattr(body_limits, "decode_json", lambda raw, kind: kind(messages=[]))
    for raw in (b'{"a":"' + b'[\\"{' * 300_000 + b'"}', b'{"a":"' + b'\\"[' * 300_000):
        body_limits.decode_long_json(raw, ChatRequest)


def test_work_on_a_long_conversation_is_not_done_on_the_event_loop():
    """Converting, rendering, tokenizing and the grammar run in threads, for each API."""
    text = "word " * 20_000
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": text}}}
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": text}]},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text},
        "/v1/completions": {"prompt": "a", "guided_json": schema},
        "/tokenize": {"messages": [{"role": "user", "content": text}]},
    }
    on_loop: list[str] = []

    def watch(frame, event, argument):
        name = frame.f_code.co_name
        if event == "call" and name in WORK:
            on_loop.append(f"{frame.f_globals['__name__']}.{name}")

    async def scenario(harness):
        for path, body in bodies.items():
            sys.setprofile(watch)  # of this thread, which is the event loop's
            try:
                answer = await harness.client.post(path, json=body)
            finally:
                sys.setprofile(None)
            assert answer.status_code in (200, 400), answer.text

    run(scenario)
    assert on_loop == []


WORK = {"plain_messages", "chat_request", "chat_text", "encode_chat", "to_grammar"}
"""Functions whose time grows with the conversation."""


def test_many_log_probabilities_are_not_written_on_the_event_loop():
    """An answer with the log-probabilities of 300 tokens is built in a thread; an answer with
    those of 5 is not."""
    on_loop: list[str] = []

    def watch(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "chat_logprobs":
            on_loop.append("chat_logprobs")

    async def scenario(harness):
        for max_tokens, wanted in ((300, 0), (5, 1)):
            sys.setprofile(watch)  # of this thread, which is the event loop's
            try:
                answer = await harness.chat(
                    max_tokens=max_tokens, logprobs=True, top_logprobs=1
                )
            finally:
                sys.setprofile(None)
            content = answer.json()["choices"][0]["logprobs"]["content"]
            assert len(content) == max_tokens
            assert len(on_loop) == wanted

    run(scenario)


def test_log_probabilities_of_a_prompt_are_limited():
    """Reading log-probabilities from the engine takes the event loop's time."""
    check_prompt_logprobs(1, 65_536)
    with pytest.raises(RequestRefused, match="168000 values; the limit is 131072"):
        check_prompt_logprobs(20, 8_000)


def test_many_blocks_of_a_message_are_joined_once():
    """Appending each block to the text would copy megabytes for every block."""
    blocks = [{"type": "text", "text": "b" * 100}] * 20_000
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
    content = [*blocks, result, *blocks[:2]]
    body = msgspec.convert(
        {"messages": [{"role": "user", "content": content}]}, CountTokensRequest
    )

    first, tool, last = messages_request.chat_request(body).messages

    assert first.content == "\n\n".join(["b" * 100] * 20_000)
    assert (tool.role, last.content) == ("tool", "b" * 100 + "\n\n" + "b" * 100)


def test_a_grammar_that_is_too_long_is_refused_unread(monkeypatch):
    """A long grammar is neither converted nor written as JSON: both take seconds for
    megabytes."""
    monkeypatch.setattr(structured, "to_lark", lambda grammar: pytest.fail("converted"))
    monkeypatch.setattr(json, "dumps", lambda *args, **kwargs: pytest.fail("written"))
    monkeypatch.setattr(json, "loads", lambda *args, **kwargs: pytest.fail("read"))
    text = "a" * (structured.MAX_GRAMMAR_BYTES + 1)
    for fields in (
        {"grammar": text},
        {"regex": text},
        {"json": text},
        {"json": {"enum": [1] * structured.MAX_GRAMMAR_BYTES}},
        {"choice": [text]},
    ):
        with pytest.raises(RequestError, match="longer than"):
            structured.StructuredOutput(**fields).to_grammar()


def test_schemas_of_forced_tools_have_a_limit():
    """Schemas become a grammar, which is compiled and sent to the engine."""
    long = {"type": "object", "properties": {"a": {"description": "x" * (1 << 17)}}}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": long}}
        for n in range(9)
    ]

    async def scenario(harness):
        answer = await harness.chat(tools=tools, tool_choice="required")
        assert "grammar is longer than" in error(answer, 400)["message"]

    run(scenario, limits=LimitsConfig(max_body_bytes=64 << 20))


def test_the_start_of_a_conversation_is_named_without_reading_megabytes():
    """Turns of one conversation have one name, whatever their length."""
    long = Message(role="system", content="s" * 9_000_000)
    first = [long, Message(role="user", content="hello")]
    other = [long, Message(role="user", content="other")]

    name = conversation_start(first)

    assert name == conversation_start([*first, Message(role="assistant", content="hi")])
    assert name != conversation_start(other)
    parts = [TextPart(type="text", text="hello")]
    assert conversation_start([Message(role="user", content=parts)]) != name


def test_a_cancelled_request_leaves_no_half_read_worker():
    """The next body does not get the result of the cancelled one."""

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


def test_a_client_that_disconnects_does_not_cost_a_process(monkeypatch):
    """The existing workers finish bodies that are sent and abandoned."""
    started = []

    class Counted(worker_pool._Worker):
        def __init__(self, module):
            started.append(module)
            super().__init__(module)

    monkeypatch.setattr(worker_pool, "_Worker", Counted)

    async def scenario():
        parser = BodyParser()
        big = json.dumps({"messages": [{"role": "user", "content": LONG * 4}]}).encode()
        for _ in range(5):
            asked = asyncio.create_task(parser.parse(big, ChatRequest))
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        assert (await parser.parse(big, ChatRequest)).messages[0].content == LONG * 4
        parser.close()

    asyncio.run(scenario())
    assert len(started) <= 2


def test_the_length_of_finished_choices_is_checked():
    """`has_ended` allows neither more tokens than `max_tokens` nor invalid ids."""

    async def scenario(harness):
        for ids in ([65] * 9, [1 << 30]):
            entry = {"has_ended": True, "token_ids": ids}
            answer = await harness.complete(stream=True, max_tokens=8, continue_choices=[entry])
            assert error(answer, 400)["param"] == "continue_choices"

    run(scenario)


def test_a_stream_is_resumed_without_parsing_its_body_again():
    """The field of the continuation is appended to the body's text; a parser takes the last of
    two equal fields."""
    progress = StreamProgress()
    progress.strip(b': headwater {"tokens":[7],"seed":1,"created":9}\ndata: {}\n\n')

    for raw in (b'{"prompt": "x"}', b' {"prompt": "x" } \n', b"{}"):
        added = json.loads(progress.body(raw))["continue_choices"]
        assert added == [{"token_ids": [7], "seed": 1, "created": 9, "has_ended": False}]
    again = b'{"prompt":"x","continue_choices":[{"token_ids":[5],"seed":1}]}'
    assert json.loads(progress.body(again))["continue_choices"][0]["token_ids"] == [5, 7]


def test_a_router_reads_long_bodies_in_another_process(monkeypatch):
    """The router's own process does not parse long bodies."""
    message = {"role": "user", "content": "hello " * 30}
    path = "/v1/chat/completions"
    bodies = [
        json.dumps({"messages": [message] * number}).encode() for number in (4000, 12_000)
    ]
    expected = [prompt_fields(path, raw, 1 << 21) for raw in bodies]
    assert [bool(fields.text) for fields in expected] == [True, False]  # the second is too long
    module = "headwater.server.router.prompt_fields.prompt_fields"
    monkeypatch.setattr(module, lambda *arguments: pytest.fail("parsed here"))

    async def scenario():
        reader = FieldReader()
        found = [await reader.read(path, raw, 1 << 21) for raw in bodies]
        reader.close()
        return found

    assert asyncio.run(scenario()) == expected


def test_a_router_hashes_no_prompt_that_is_longer_than_any_context():
    """Neither a text nor token ids of such a length are hashed: the instance refuses them."""
    fits = prompt_fields("/v1/completions", b'{"prompt": [1, 2, 3]}', 64 * 16)
    long = json.dumps({"prompt": [1] * 65}).encode()

    assert fits.token_ids == np.array([1, 2, 3], dtype=np.int32).tobytes()
    assert prompt_fields("/v1/completions", long, 64 * 16).token_ids == b""
    text = json.dumps({"prompt": "x" * 1100}).encode()
    assert prompt_fields("/v1/completions", text, 64 * 16).text == b""


def test_a_text_that_no_instance_can_take_is_not_tokenized_for_routing():
    """The router forwards such a text by load, and the instance refuses it without parsing."""

    async def scenario(harness):
        instance = harness.add()
        await harness.ready(instance)
        paths = instance.note_paths()
        answer = await harness.complete(prompt="word " * 10_000)
        assert answer.status_code == 400
        assert paths == ["/v1/completions"]

    run_router(scenario)
