"""POST /v1/completions: what is accepted, and the messages of refusals."""

import asyncio
import threading
from pathlib import Path

import pytest

from headwater.config import EngineConfig
from headwater.engine.detokenizer import TextStream
from headwater.server.body import NEUTRAL
from headwater.server.config import LimitsConfig
from headwater.server.schema import ChatRequest, CompletionRequest
from tests.server.harness import error, run


def test_unknown_fields_are_ignored():
    """A client may send fields that only other servers know."""

    async def scenario(harness):
        response = await harness.complete(
            some_new_field={"a": 1}, service_tier="auto", store=True
        )
        assert response.status_code == 200

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"regex": "a+"}, "regex"),
    ],
)
def test_known_fields_that_are_not_supported_are_refused_by_name(fields, param):
    """Ignoring such a field would return something other than the client requested."""

    async def scenario(harness):
        found = error(await harness.complete(**fields), 400)
        assert found["param"] == param
        assert param in found["message"]

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"suffix": "end"}, "leave it out"),
        ({"best_of": 2}, "send n, whose answers are all returned"),
        ({"truncate_prompt_tokens": 2}, "shorten the prompt instead"),
    ],
)
def test_the_message_for_an_unsupported_field_ends_with_what_to_do(fields, advice):
    """The advice is a whole sentence of its own."""

    async def scenario(harness):
        found = error(await harness.complete(**fields), 400)
        [(name, _)] = fields.items()
        assert found["message"] == f"{name!r} is not supported by this server; {advice}"

    run(scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": False},
        {"best_of": 1},
        {"bad_words": [], "allowed_token_ids": None, "length_penalty": 1.0},
        {"suffix": None},
        {"response_format": {"type": "text"}},
        {"n": None, "stop": None, "seed": None, "temperature": None, "stream": None},
        {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": -1}},
    ],
)
def test_values_that_ask_for_nothing_special_are_accepted(fields):
    """Clients send defaults and nulls; these mean the same as leaving the field out."""

    async def scenario(harness):
        assert (await harness.complete(**fields)).status_code == 200

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [260]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"] * 300}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 99, "max_tokens": 5}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 300}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(200))}, "stop_token_ids"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(fields, param):
    """Lesson 68: every field has limits, and a violation is reported as an OpenAI error
    object."""

    async def scenario(harness):
        assert error(await harness.complete(**fields), 400)["param"] == param

    run(scenario)


def test_a_priority_without_effect_is_refused():
    """Ignoring the priority would surprise the client; 0 has no effect and is accepted."""

    async def scenario(harness):
        harness.service.engine_config = EngineConfig(scheduling_policy="fcfs")
        refusal = error(await harness.complete(priority=-1), 400)
        assert refusal["param"] == "priority"
        assert "--scheduling-policy fcfs" in refusal["message"]
        assert (await harness.complete(priority=0)).status_code == 200
        harness.service.engine_config = EngineConfig(scheduling_policy="priority")
        assert (await harness.complete(priority=-1)).status_code == 200

    run(scenario)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"{}", "prompt"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "\xff"}', "JSON"),
        (b'{"prompt": 1e999}', ""),
        (b'{"prompt": "a", "some_new_field": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
    ],
)
def test_a_body_that_is_not_a_request_is_a_400(body, word):
    """Lesson 68: for any body, the answer is a message and not a traceback."""

    async def scenario(harness):
        response = await harness.client.post("/v1/completions", content=body)
        assert word in error(response, 400)["message"]

    run(scenario)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": "x" * 600}, {"prompt": "x" * 512}, {"prompt": "x" * 500, "max_tokens": 13}],
)
def test_too_long_a_request_is_a_400_with_openais_code(fields):
    """Lesson 68: prompt and output have to fit in the model."""

    async def scenario(harness):
        assert error(await harness.complete(**fields), 400)["code"] == "context_length_exceeded"

    run(scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_text_that_cannot_fit_is_refused_unread(path):
    """Lesson 68: megabytes of text are not tokenised only to find that they are too long."""

    async def scenario(harness):
        text = "long " * 200_000
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages} if "chat" in path else {"prompt": text}
        detail = error(await harness.post(path, body), 400)
        assert detail["code"] == "context_length_exceeded"
        assert "characters" in detail["message"]

    run(scenario)


def test_a_short_prompt_does_not_wait_for_long_ones():
    """Lesson 68: long texts of one client do not delay the tokenisation of others."""

    async def scenario(harness):
        block = threading.Event()
        long = [
            asyncio.create_task(harness.service.in_thread(block.wait, size=1 << 20))
            for _ in range(8)
        ]
        assert (await harness.complete()).status_code == 200
        assert (await harness.chat()).status_code == 200
        block.set()
        await asyncio.gather(*long)

    run(scenario)


def test_the_longest_request_that_fits_is_served():
    """The limit itself is allowed."""

    async def scenario(harness):
        response = await harness.complete(prompt="x" * 500, max_tokens=12)
        assert response.json()["usage"]["total_tokens"] == 512

    run(scenario)


def test_another_model_is_a_404():
    """The message names the served model."""

    async def scenario(harness):
        found = error(await harness.complete(model="gpt-9"), 404)
        assert found["code"] == "model_not_found"
        assert "echo" in found["message"]

    run(scenario)


def test_a_long_body_is_a_413_before_it_is_read():
    """Lesson 68: a body is refused by its announced length, or as soon as more bytes arrive
    than allowed."""

    async def scenario(harness):
        error(await harness.complete(prompt="x" * 2000), 413)

        async def pieces():
            for _ in range(100):
                yield b" " * 100

        error(await harness.client.post("/v1/completions", content=pieces()), 413)

    run(scenario, LimitsConfig(max_body_bytes=1000))


def test_a_full_queue_is_a_429_with_retry_after():
    """Above the limit requests are refused at once; later there is room again."""

    async def scenario(harness):
        harness.engine.hold()
        waiting = [asyncio.create_task(harness.complete()) for _ in range(10)]
        await harness.until_live(10)
        response = await harness.complete()
        assert error(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        harness.engine.flow()
        assert {(await task).status_code for task in waiting} == {200}
        assert (await harness.complete()).status_code == 200

    run(scenario, LimitsConfig(max_queued=2))


def test_more_than_ever_fits_is_a_400_and_not_a_429():
    """A client that is told to retry must be able to succeed."""

    async def scenario(harness):
        assert "11 sequences" in error(await harness.complete(n=11), 400)["message"]
        assert (await harness.complete(n=10)).status_code == 200

    run(scenario, LimitsConfig(max_queued=2))


def test_more_than_ever_fits_is_refused_before_anything_is_made_for_it(monkeypatch):
    """A request with 256 prompts and `n` of 64 once blocked the event loop for half a second."""
    made = []
    real = TextStream.__init__

    def noting(self, *args, **settings):
        made.append(1)
        real(self, *args, **settings)

    monkeypatch.setattr(TextStream, "__init__", noting)

    async def scenario(harness):
        error(await harness.complete(prompt=["a"] * 4, n=3, echo=True), 400)
        assert not made
        assert (await harness.complete()).status_code == 200
        assert made

    run(scenario, LimitsConfig(max_queued=2))


def test_every_refused_field_is_in_the_schema_and_in_the_api_reference():
    """A listed field that is not parsed would be ignored; an undocumented one would
    surprise."""
    reference = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    parsed = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}

    assert set(NEUTRAL) <= parsed
    assert [name for name in NEUTRAL if f"`{name}`" not in reference] == []
