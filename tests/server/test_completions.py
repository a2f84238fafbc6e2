"""POST /v1/completions over an echo engine."""

import asyncio
import threading
from unittest.mock import ANY

import pytest

from headwater.config import EngineConfig, LimitsConfig
from tests.server.rig import byte_tokenizer, error, events, run


def test_an_answer_has_the_shape_of_openai():
    """Text, reason and usage; `cached_tokens` always, 0 when none (lesson 64)."""

    async def scenario(rig):
        response = await rig.complete(max_tokens=6)
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
        }

    run(scenario)


def test_a_stream_joins_to_the_whole_answer():
    """The same request streamed gives the same text and ids, then usage, then [DONE]."""

    async def scenario(rig):
        fields = {"max_tokens": 40, "return_token_ids": True, "seed": 1}
        whole = (await rig.complete(**fields)).json()["choices"][0]
        response = await rig.complete(
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
    """One answer a prompt, in order."""

    async def scenario(rig):
        body = (await rig.complete(prompt=prompt)).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(count))

    run(scenario)


def test_n_choices_differ_and_are_the_same_each_time():
    """Choice i of a seeded request is its own random stream, whatever ran beside it."""

    async def scenario(rig):
        fields = {"n": 3, "seed": 5, "max_tokens": 8, "return_token_ids": True}
        bodies = [(await rig.complete(**fields)).json() for _ in range(2)]
        first, again = ([c["token_ids"] for c in body["choices"]] for body in bodies)
        assert first == again
        assert len({tuple(ids) for ids in first}) == 3
        assert bodies[0]["usage"]["prompt_tokens"] == 5
        assert bodies[0]["usage"]["completion_tokens"] == 24

    run(scenario)


def test_streamed_choices_are_told_apart_by_index():
    """Chunks of several choices mix; each choice ends once."""

    async def scenario(rig):
        chunks = events(await rig.complete(n=3, stream=True, max_tokens=5))
        ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
        assert sorted(ends) == [0, 1, 2]

    run(scenario)


def test_a_stop_string_ends_the_text_and_the_work():
    """The text ends before the stop string; the engine's slots come back."""

    async def scenario(rig):
        whole = (await rig.complete(max_tokens=200, seed=1)).json()["choices"][0]["text"]
        stop = next(char for char in whole if char.isascii() and char.isprintable())
        cut = (await rig.complete(max_tokens=200, seed=1, stop=["@@@", stop])).json()
        choice = cut["choices"][0]
        assert choice["text"] == whole[: whole.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert cut["usage"]["completion_tokens"] < 200
        kept = await rig.complete(
            max_tokens=200, seed=1, stop=stop, include_stop_str_in_output=True
        )
        assert kept.json()["choices"][0]["text"] == whole[: whole.index(stop) + 1]
        await asyncio.sleep(0)
        await rig.until_idle()
        assert await rig.all_free()

    run(scenario)


def test_a_stop_token_ends_the_text():
    """`stop_token_ids` stop without a trace in the text, and are named."""

    async def scenario(rig):
        fields = {"max_tokens": 30, "seed": 1, "return_token_ids": True}
        ids = (await rig.complete(**fields)).json()["choices"][0]["token_ids"]
        choice = (await rig.complete(**fields, stop_token_ids=[ids[10]])).json()["choices"][0]
        end = ids.index(ids[10])
        assert choice["token_ids"] == ids[: end + 1]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[10])

    run(scenario)


def test_logprobs_are_parallel_lists():
    """One entry a token: its text, its log-probability, its alternatives, its place."""

    async def scenario(rig):
        fields = {"max_tokens": 9, "logprobs": 1, "seed": 1}
        choice = (await rig.complete(**fields)).json()["choices"][0]
        found = choice["logprobs"]
        assert {len(entries) for entries in found.values()} == {9}
        assert found["token_logprobs"] == [-0.5] * 9
        assert found["text_offset"][0] == 0
        chunks = events(await rig.complete(**fields, stream=True))
        streamed = [c["choices"][0]["logprobs"] for c in chunks]
        assert [name for part in streamed for name in part["tokens"]] == found["tokens"]
        offsets = [place for part in streamed for place in part["text_offset"]]
        assert offsets == found["text_offset"]

    run(scenario)


def test_a_repeated_prompt_is_reported_as_cached():
    """Lessons 63 to 65: what was reused, from which tier, and why not more."""

    async def scenario(rig):
        prompt = "x" * 100
        cold = (await rig.complete(prompt=prompt, cache_details=True)).json()["usage"]
        warm = (await rig.complete(prompt=prompt, cache_details=True)).json()["usage"]
        short = (await rig.complete(prompt="y", cache_details=True)).json()["usage"]
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
    """Lesson 67: a prompt is found again only by the salt it was computed for; and
    lesson 63: the reason of a miss says nothing about other tenants."""

    async def scenario(rig):
        prompt = "x" * 100
        for salt in ("a", "b", None):
            fields = {"cache_salt": salt} if salt else {}
            usage = (await rig.complete(prompt=prompt, cache_details=True, **fields)).json()[
                "usage"
            ]
            details = usage["prompt_tokens_details"]
            assert details["cached_tokens"] == 0
            assert details["cache"]["miss_reason"] == "never_seen"
        again = (await rig.complete(prompt=prompt, cache_salt="a")).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == 96

    run(scenario)


def test_fields_it_does_not_know_are_ignored():
    """A client may send what only other servers understand."""

    async def scenario(rig):
        response = await rig.complete(some_new_field={"a": 1}, service_tier="auto", store=True)
        assert response.status_code == 200

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_fields_it_knows_but_does_not_serve_are_named(fields, param):
    """Ignoring them would answer another question than was asked."""

    async def scenario(rig):
        found = error(await rig.complete(**fields), 400)
        assert found["param"] == param
        assert param in found["message"]

    run(scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": False},
        {"best_of": 1},
        {"suffix": None},
        {"response_format": {"type": "text"}},
        {"n": None, "stop": None, "seed": None, "temperature": None, "stream": None},
        {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": -1}},
    ],
)
def test_values_that_ask_for_nothing_special_are_accepted(fields):
    """Clients send defaults and nulls; they mean what leaving them out means."""

    async def scenario(rig):
        assert (await rig.complete(**fields)).status_code == 200

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
    """Lesson 68: limits on every field, told as an OpenAI error object."""

    async def scenario(rig):
        assert error(await rig.complete(**fields), 400)["param"] == param

    run(scenario)


def test_a_priority_that_nobody_looks_at_is_refused():
    """Silence would give a client something else than it asked for; 0 asks for nothing."""

    async def scenario(rig):
        rig.service.engine_config = EngineConfig(scheduling_policy="fcfs")
        refusal = error(await rig.complete(priority=-1), 400)
        assert refusal["param"] == "priority"
        assert "--scheduling-policy fcfs" in refusal["message"]
        assert (await rig.complete(priority=0)).status_code == 200
        rig.service.engine_config = EngineConfig(scheduling_policy="priority")
        assert (await rig.complete(priority=-1)).status_code == 200

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
def test_a_body_that_is_no_request_is_a_400(body, word):
    """Lesson 68: whatever arrives, the answer is a sentence and not a traceback."""

    async def scenario(rig):
        response = await rig.client.post("/v1/completions", content=body)
        assert word in error(response, 400)["message"]

    run(scenario)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": "x" * 600}, {"prompt": "x" * 512}, {"prompt": "x" * 500, "max_tokens": 13}],
)
def test_too_long_a_request_is_a_400_with_openais_code(fields):
    """Lesson 68: prompt and output have to fit in the model."""

    async def scenario(rig):
        assert error(await rig.complete(**fields), 400)["code"] == "context_length_exceeded"

    run(scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_text_that_cannot_fit_is_refused_unread(path):
    """Lesson 68: megabytes of text are not tokenised to find out that they are too long."""

    async def scenario(rig):
        text = "long " * 200_000
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages} if "chat" in path else {"prompt": text}
        detail = error(await rig.post(path, body), 400)
        assert detail["code"] == "context_length_exceeded"
        assert "characters" in detail["message"]

    run(scenario)


def test_a_short_prompt_does_not_wait_for_long_ones():
    """Lesson 68: a client with long texts cannot keep the others from being tokenised."""

    async def scenario(rig):
        block = threading.Event()
        long = [
            asyncio.create_task(rig.service.in_thread(block.wait, size=1 << 20))
            for _ in range(8)
        ]
        assert (await rig.complete()).status_code == 200
        assert (await rig.chat()).status_code == 200
        block.set()
        await asyncio.gather(*long)

    run(scenario)


def test_the_longest_request_that_fits_is_served():
    """The limit itself is inside."""

    async def scenario(rig):
        response = await rig.complete(prompt="x" * 500, max_tokens=12)
        assert response.json()["usage"]["total_tokens"] == 512

    run(scenario)


def test_another_model_is_a_404():
    """A client that asks for another model is told which one is here."""

    async def scenario(rig):
        found = error(await rig.complete(model="gpt-9"), 404)
        assert found["code"] == "model_not_found"
        assert "echo" in found["message"]

    run(scenario)


def test_a_long_body_is_a_413_before_it_is_read():
    """Lesson 68: by its announced length, or as soon as more arrives than is allowed."""

    async def scenario(rig):
        error(await rig.complete(prompt="x" * 2000), 413)

        async def pieces():
            for _ in range(100):
                yield b" " * 100

        error(await rig.client.post("/v1/completions", content=pieces()), 413)

    run(scenario, LimitsConfig(max_body_bytes=1000))


def test_a_full_queue_is_a_429_with_retry_after():
    """Beyond what may wait, requests are turned away at once; then there is room again."""

    async def scenario(rig):
        rig.engine.hold()
        waiting = [asyncio.create_task(rig.complete()) for _ in range(10)]
        await rig.until_live(10)
        response = await rig.complete()
        assert error(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        rig.engine.flow()
        assert {(await task).status_code for task in waiting} == {200}
        assert (await rig.complete()).status_code == 200

    run(scenario, LimitsConfig(max_queued=2))


def test_more_than_ever_fits_is_a_400_and_not_a_429():
    """A client that is told to come back later must have a chance then."""

    async def scenario(rig):
        assert "11 sequences" in error(await rig.complete(n=11), 400)["message"]
        assert (await rig.complete(n=10)).status_code == 200

    run(scenario, LimitsConfig(max_queued=2))


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_is_told_to_the_client(stream):
    """Lesson 58: by the name the client gave; a 499, or the last chunk of a stream."""

    async def scenario(rig):
        rig.engine.hold()
        waiting = asyncio.create_task(rig.complete(request_id="mine", n=2, stream=stream))
        await rig.until_waiting(2)
        unknown = await rig.post("/v1/abort_requests", {"request_ids": ["other"]})
        assert unknown.json() == {"aborted": 0}
        aborted = await rig.post("/v1/abort_requests", {"request_ids": ["cmpl-mine"]})
        assert aborted.json() == {"aborted": 2}
        response = await waiting
        if stream:
            reasons = [c["choices"][0]["finish_reason"] for c in events(response)]
            assert reasons == ["abort", "abort"]
        else:
            assert error(response, 499)["code"] == "aborted"
        rig.engine.flow()
        assert (await rig.complete()).status_code == 200

    run(scenario)


@pytest.mark.parametrize("name", ["cmpl-1", "chatcmpl-1", "chatcmpl-cmpl-1"])
def test_a_name_that_looks_like_an_answers_id_can_be_aborted(name):
    """Whatever a client calls its request: by that name, or by the id of its answer."""

    async def scenario(rig):
        rig.engine.hold()
        for given in (name, f"cmpl-{name}"):
            waiting = asyncio.create_task(rig.complete(request_id=name))
            await rig.until_waiting(1)
            aborted = await rig.post("/v1/abort_requests", {"request_ids": [given]})
            assert aborted.json() == {"aborted": 1}
            error(await waiting, 499)

    run(scenario)


def test_request_ids_are_echoed_and_may_be_used_twice():
    """A client's own id comes back, in the header and the body; two may share one."""

    async def scenario(rig):
        responses = await asyncio.gather(
            *(rig.complete(request_id="same") for _ in range(2)),
            rig.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "head"}),
        )
        assert [r.json()["id"] for r in responses] == ["cmpl-same", "cmpl-same", "cmpl-head"]
        assert [r.headers["x-request-id"] for r in responses] == ["same", "same", "head"]

    run(scenario)


@pytest.mark.parametrize("num_streamed", [0, 3])
def test_a_client_that_leaves_is_aborted(num_streamed):
    """Lesson 58: a closed connection ends the work and returns every slot."""

    async def scenario(rig):
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

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "query_string": b"",
        }
        if not num_streamed:
            rig.engine.hold()
        exchange = asyncio.create_task(rig.gate(scope, receive, send))
        if not num_streamed:
            await rig.until_live(1)
            gone.set()
        await exchange
        rig.engine.flow()
        await rig.until_idle()
        assert await rig.all_free()
        assert (await rig.engine.stats()).num_running == 0

    run(scenario)


def test_a_dead_engine_is_told_at_once():
    """Waiting clients get a 503, or an error event where a stream has begun; /health too."""

    async def scenario(rig):
        rig.engine.hold()
        waiting = [asyncio.create_task(rig.complete()) for _ in range(2)]
        await rig.until_live(2)
        rig.engine.die("the engine process ended with signal 9")
        for task in waiting:
            assert error(await task, 503)["code"] == "engine_dead"
        assert "signal 9" in error(await rig.client.get("/health"), 503)["message"]
        error(await rig.complete(stream=True), 503)
        assert (await rig.client.get("/metrics")).status_code == 200

    run(scenario)


def test_an_error_in_a_begun_stream_is_an_event():
    """The status is sent already; the client learns of the failure inside the stream."""

    async def scenario(rig):
        async def die_later():
            await rig.until(lambda: rig.engine.core.stats().num_steps >= 3)
            rig.engine.die("gone")

        task = asyncio.create_task(die_later())
        response = await rig.complete(stream=True, max_tokens=400)
        await task
        chunks = events(response)
        assert response.status_code == 200
        assert chunks[-1]["error"]["code"] == "engine_dead"
        assert "choices" in chunks[0]

    run(scenario)


def test_broken_characters_never_reach_a_stream_in_halves():
    """An echo engine speaks random bytes: what is streamed is what decoding at once gives."""

    async def scenario(rig):
        fields = {"max_tokens": 300, "seed": 9, "return_token_ids": True}
        chunks = events(await rig.complete(**fields, stream=True))
        ids = [token for c in chunks for token in c["choices"][0]["token_ids"]]
        text = "".join(c["choices"][0]["text"] for c in chunks)
        assert text == byte_tokenizer().decode(ids)

    run(scenario)


def test_choices_of_one_stream_never_overtake_its_beginning():
    """However slow the connection is, the status line is sent before any event."""

    async def scenario(rig):
        sent = []

        async def send(message):
            if message["type"] == "http.response.start":
                for _ in range(50):  # the connection is full, just now
                    await asyncio.sleep(0)
            sent.append(message["type"])

        body = b'{"prompt": "hello", "n": 4, "max_tokens": 3, "stream": true}'
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if incoming:
                return incoming.pop()
            return await asyncio.Event().wait()  # the client stays

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "query_string": b"",
        }
        await rig.gate(scope, receive, send)
        assert sent[0] == "http.response.start"
        assert set(sent[1:]) == {"http.response.body"}

    run(scenario)
