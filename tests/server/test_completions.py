"""POST /v1/completions over an echo engine."""

import asyncio
import json
from unittest.mock import ANY

import pytest

from headwater.scheduler.request import SequenceOutput
from headwater.server.errors import ErrorObject
from headwater.server.streaming import EventStream
from headwater.testing.engines import EchoEngine
from tests.server.harness import byte_tokenizer, completion_scope, error, events, run


def test_an_answer_has_the_shape_of_openai():
    """An answer has text, reason and usage; `cached_tokens` is always present, 0 when none
    (lesson 64)."""

    async def scenario(harness):
        response = await harness.complete(max_tokens=6)
        body = response.json()
        assert response.status_code == 200
        assert body["object"] == "text_completion"
        assert body["model"] == "echo"
        assert body["id"].startswith("cmpl-")
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 6,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    run(scenario)


def test_a_stream_joins_to_the_whole_answer():
    """The same request streamed gives the same text and ids, then usage, then [DONE]."""

    async def scenario(harness):
        fields = {"max_tokens": 40, "return_token_ids": True, "seed": 1}
        whole = (await harness.complete(**fields)).json()["choices"][0]
        response = await harness.complete(
            **fields, stream=True, stream_options={"include_usage": True}
        )
        chunks = events(response)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["text"]
        ids = [token for c in chunks[:-1] for token in c["choices"][0]["token_ids"]]
        assert ids == whole["token_ids"]
        assert chunks[0]["choices"][0]["prompt_token_ids"] == list(b"hello")
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 40

    run(scenario)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("text", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1, 2], [3]], 2)],
)
def test_prompts_are_text_or_ids_or_lists_of_either(prompt, count):
    """There is one answer per prompt, in order."""

    async def scenario(harness):
        body = (await harness.complete(prompt=prompt)).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(count))

    run(scenario)


def test_n_choices_differ_and_are_the_same_each_time():
    """Choice i of a seeded request has its own random stream, whatever runs at the same
    time."""

    async def scenario(harness):
        fields = {"n": 3, "seed": 5, "max_tokens": 8, "return_token_ids": True}
        bodies = [(await harness.complete(**fields)).json() for _ in range(2)]
        first, again = ([c["token_ids"] for c in body["choices"]] for body in bodies)
        assert first == again
        assert len({tuple(ids) for ids in first}) == 3
        assert bodies[0]["usage"]["prompt_tokens"] == 5
        assert bodies[0]["usage"]["completion_tokens"] == 24

    run(scenario)


def test_streamed_choices_are_told_apart_by_index():
    """Chunks of several choices may mix; each choice ends once."""

    async def scenario(harness):
        chunks = events(await harness.complete(n=3, stream=True, max_tokens=5))
        ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
        assert sorted(ends) == [0, 1, 2]

    run(scenario)


def test_a_stop_string_ends_the_text_and_the_work():
    """The text ends before the stop string; the engine's slots are returned."""

    async def scenario(harness):
        whole = (await harness.complete(max_tokens=200, seed=1)).json()["choices"][0]["text"]
        stop = next(char for char in whole if char.isascii() and char.isprintable())
        cut = (await harness.complete(max_tokens=200, seed=1, stop=["@@@", stop])).json()
        choice = cut["choices"][0]
        assert choice["text"] == whole[: whole.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert cut["usage"]["completion_tokens"] < 200
        kept = await harness.complete(
            max_tokens=200, seed=1, stop=stop, include_stop_str_in_output=True
        )
        assert kept.json()["choices"][0]["text"] == whole[: whole.index(stop) + 1]
        await asyncio.sleep(0)
        await harness.until_idle()
        assert await harness.all_free()

    run(scenario)


class JoinedSteps(EchoEngine):
    """Delivers the tokens of several steps together, as to a reader that was busy."""

    async def generate(self, request):
        yield SequenceOutput(request.request_id, list(b"one.two"), [None] * 7)
        yield SequenceOutput(request.request_id, list(b"!"), [None], "length")


def test_tokens_after_a_stop_string_do_not_count():
    """Such tokens are not in the answer, its token ids or its usage, although the engine
    computed them."""

    async def scenario(harness):
        answer = (await harness.complete(stop=".", return_token_ids=True)).json()
        choice = answer["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("one", ".")
        assert bytes(choice["token_ids"]) == b"one."
        assert answer["usage"]["completion_tokens"] == 4

    run(scenario, engine=JoinedSteps())


def test_a_stop_token_ends_the_text():
    """`stop_token_ids` end the text without being shown, and are named as the reason."""

    async def scenario(harness):
        fields = {"max_tokens": 30, "seed": 1, "return_token_ids": True}
        ids = (await harness.complete(**fields)).json()["choices"][0]["token_ids"]
        choice = (await harness.complete(**fields, stop_token_ids=[ids[10]])).json()["choices"][
            0
        ]
        end = ids.index(ids[10])
        assert choice["token_ids"] == ids[: end + 1]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[10])

    run(scenario)


def test_logprobs_are_parallel_lists():
    """There is one entry per token: its text, log-probability, alternatives and offset."""

    async def scenario(harness):
        fields = {"max_tokens": 9, "logprobs": 1, "seed": 1}
        choice = (await harness.complete(**fields)).json()["choices"][0]
        found = choice["logprobs"]
        assert {len(entries) for entries in found.values()} == {9}
        assert found["token_logprobs"] == [-0.5] * 9
        assert found["text_offset"][0] == 0
        chunks = events(await harness.complete(**fields, stream=True))
        streamed = [c["choices"][0]["logprobs"] for c in chunks]
        assert [name for part in streamed for name in part["tokens"]] == found["tokens"]
        offsets = [place for part in streamed for place in part["text_offset"]]
        assert offsets == found["text_offset"]

    run(scenario)


def test_a_repeated_prompt_is_reported_as_cached():
    """Lessons 63 to 65: the usage has reused tokens by tier, and why not more were reused."""

    async def scenario(harness):
        prompt = "x" * 100
        cold = (await harness.complete(prompt=prompt, cache_details=True)).json()["usage"]
        warm = (await harness.complete(prompt=prompt, cache_details=True)).json()["usage"]
        short = (await harness.complete(prompt="y", cache_details=True)).json()["usage"]
        assert cold["prompt_tokens_details"] == {
            "cached_tokens": 0,
            "cache": {
                "device": 0,
                "host": 0,
                "storage": 0,
                "peer": 0,
                "recomputed": 100,
                "miss_reason": "never_seen",
                "block_tokens": 16,
                "queued_s": ANY,
                "loaded_bytes": 0,
                "load": None,
            },
        }
        assert warm["prompt_tokens_details"]["cached_tokens"] == 96
        assert warm["prompt_tokens_details"]["cache"]["device"] == 96
        assert short["prompt_tokens_details"]["cache"]["miss_reason"] == "too_short"

    run(scenario)


def test_salts_keep_tenants_apart():
    """Lesson 67: a prompt hits only with the salt it was computed for; and lesson 63: the miss
    reason reveals nothing about other tenants."""

    async def scenario(harness):
        prompt = "x" * 100
        for salt in ("a", "b", None):
            fields = {"cache_salt": salt} if salt else {}
            usage = (
                await harness.complete(prompt=prompt, cache_details=True, **fields)
            ).json()["usage"]
            details = usage["prompt_tokens_details"]
            assert details["cached_tokens"] == 0
            assert details["cache"]["miss_reason"] == "never_seen"
        again = (await harness.complete(prompt=prompt, cache_salt="a")).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == 96

    run(scenario)


def test_broken_characters_never_reach_a_stream_in_halves():
    """An echo engine generates random bytes: the streamed text equals decoding everything at
    once."""

    async def scenario(harness):
        fields = {"max_tokens": 300, "seed": 9, "return_token_ids": True}
        chunks = events(await harness.complete(**fields, stream=True))
        ids = [token for c in chunks for token in c["choices"][0]["token_ids"]]
        text = "".join(c["choices"][0]["text"] for c in chunks)
        assert text == byte_tokenizer().decode(ids)

    run(scenario)


def test_no_choice_of_a_stream_is_sent_before_its_status_line():
    """However slow the connection is, the status line is sent before any event."""

    async def scenario(harness):
        sent = []

        async def send(message):
            if message["type"] == "http.response.start":
                for _ in range(50):  # the connection is full now
                    await asyncio.sleep(0)
            sent.append(message["type"])

        body = b'{"prompt": "hello", "n": 4, "max_tokens": 3, "stream": true}'
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if incoming:
                return incoming.pop()
            return await asyncio.Event().wait()  # the client stays

        await harness.readiness(completion_scope(), receive, send)
        assert sent[0] == "http.response.start"
        assert set(sent[1:]) == {"http.response.body"}

    run(scenario)


@pytest.mark.parametrize("mark", ["\u0085", "\u2028", "\u2029", "\r\n", "\x1c"])
def test_an_event_is_one_line_for_clients_that_split_text_anywhere(mark):
    """`httpx.iter_lines` also splits at other characters, so those are escaped."""
    sent: list[bytes] = []

    async def send(message):
        sent.append(message.get("body", b""))

    text = f"a{mark}b“c”"
    asyncio.run(EventStream(send, []).write(ErrorObject(message=text, type="t")))

    lines = [line for line in b"".join(sent).decode().splitlines() if line]
    assert len(lines) == 1
    assert json.loads(lines[0].removeprefix("data: "))["message"] == text


def test_echo_puts_the_prompt_before_the_answer():
    """The prompt comes first in whole answers and in streams, for a text and for token ids;
    nothing is computed again."""

    async def scenario(harness):
        plain = (await harness.complete(max_tokens=4, prompt="hello", seed=1)).json()
        fields = {"max_tokens": 4, "echo": True, "n": 2, "seed": 1}
        whole = (await harness.complete(prompt="hello", **fields)).json()
        assert whole["choices"][0]["text"] == "hello" + plain["choices"][0]["text"]
        ids = (await harness.complete(prompt=list(b"hello"), **fields)).json()
        assert [c["text"] for c in ids["choices"]] == [c["text"] for c in whole["choices"]]
        streamed = events(await harness.complete(prompt="hello", stream=True, **fields))
        for choice in whole["choices"]:
            parts = [c for e in streamed for c in e["choices"] if c["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]

    run(scenario)


def test_echo_without_tokens_is_the_prompt_alone():
    """Evaluations send `max_tokens` 0 with `echo`; without `echo` it is a 400."""

    async def scenario(harness):
        fields = {"max_tokens": 0, "echo": True, "n": 2, "return_token_ids": True}
        body = (await harness.complete(**fields)).json()
        assert [choice["text"] for choice in body["choices"]] == ["hello", "hello"]
        assert [choice["token_ids"] for choice in body["choices"]] == [[], []]
        assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
        assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (0, 5)
        chunks = events(
            await harness.complete(
                max_tokens=0, echo=True, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "hello"
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert chunks[-1]["usage"]["completion_tokens"] == 0
        refused = error(await harness.complete(max_tokens=0), 400)
        assert refused["param"] == "max_tokens"

    run(scenario)
