"""POST /v1/chat/completions over an echo engine."""

import pytest

from tests.server.harness import error, events, run


def test_an_answer_has_the_shape_of_openai():
    """An answer has a message of the assistant, a reason, and usage with `cached_tokens`."""

    async def scenario(harness):
        body = (await harness.chat()).json()
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        choice = body["choices"][0]
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == "length"
        # <|user|>hello<|end|><|assistant|>
        assert body["usage"]["prompt_tokens"] == 8
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    run(scenario)


def test_a_stream_names_the_role_first_and_joins_to_the_whole():
    """The first chunk has the role; the joined contents are the message."""

    async def scenario(harness):
        fields = {"seed": 3, "temperature": 0, "max_tokens": 30}
        whole = (await harness.chat(**fields)).json()["choices"][0]["message"]["content"]
        chunks = events(
            await harness.chat(**fields, stream=True, stream_options={"include_usage": True})
        )
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == whole
        assert all("role" not in delta for delta in deltas[1:])
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[-1]["usage"]["completion_tokens"] == 30

    run(scenario)


def test_usage_may_come_with_every_chunk():
    """With `continuous_usage_stats` a client can stop reading and still know its usage."""

    async def scenario(harness):
        options = {"continuous_usage_stats": True, "include_usage": True}
        chunks = events(await harness.chat(stream=True, stream_options=options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
        assert counts == sorted(counts)
        assert counts[-1] == 8

    run(scenario)


def test_the_whole_context_is_used_unless_told_otherwise():
    """Without a limit a reply may fill the rest of the context."""

    async def scenario(harness):
        body = (await harness.chat(max_tokens=None)).json()
        assert body["usage"]["total_tokens"] == 512
        body = (await harness.chat(max_tokens=9, max_completion_tokens=4)).json()
        assert body["usage"]["completion_tokens"] == 4

    run(scenario)


def test_logprobs_are_one_object_per_token():
    """An object has the chosen token with its bytes, and the requested number of
    alternatives."""

    async def scenario(harness):
        choice = (await harness.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == 8
        assert content[0]["logprob"] == -0.5
        assert content[0]["top_logprobs"][0]["bytes"] == content[0]["bytes"]
        plain = (await harness.chat()).json()["choices"][0]
        assert plain["logprobs"] is None

    run(scenario)


def test_the_content_of_a_message_may_be_text_parts():
    """Text parts are joined into one text; the prompt is the same."""

    async def scenario(harness):
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        messages = [{"role": "user", "content": parts}]
        body = (await harness.chat(messages=messages)).json()
        assert body["usage"]["prompt_tokens"] == 8

    run(scenario)


def test_the_next_turn_finds_the_one_before():
    """Lesson 64: prompt and reply of a turn are cached, and the next turn reports the hit."""

    async def scenario(harness):
        messages = [{"role": "user", "content": "x" * 100}]
        first = (await harness.chat(messages=messages)).json()
        reply = first["choices"][0]["message"]["content"]
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "and then?"},
        ]
        usage = (await harness.chat(messages=messages)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 96

    run(scenario)


def test_prompt_and_reply_ids_are_returned_when_asked():
    """`return_token_ids` returns the ids, which cannot be recovered exactly from text."""

    async def scenario(harness):
        body = (await harness.chat(return_token_ids=True)).json()
        assert body["prompt_token_ids"] == [257, *b"hello", 256, 258]
        assert len(body["choices"][0]["token_ids"]) == 8
        first = events(await harness.chat(return_token_ids=True, stream=True))[0]
        assert first["prompt_token_ids"] == body["prompt_token_ids"]
        assert "prompt_token_ids" not in (await harness.chat()).json()

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}] * 2},
            "tools",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "object", "if": {}}},
                }
            },
            "response_format",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_an_unsupported_field_is_a_400_that_names_it(fields, param):
    """A field may be known but not supported, or invalid; in both cases the client learns which
    one."""

    async def scenario(harness):
        assert error(await harness.chat(**fields), 400)["param"] == param

    run(scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "functions": None},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True, "metadata": {"a": "b"}, "reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "x", "name": "me", "extra": 1}]},
    ],
)
def test_fields_without_effect_are_accepted(fields):
    """Known fields are accepted with values without effect; unknown fields are accepted too."""

    async def scenario(harness):
        response = await harness.chat(**fields)
        assert response.status_code == 200, response.text

    run(scenario)
