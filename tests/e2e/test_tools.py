"""Tools, structured output and reasoning over HTTP, with the real `openai` client."""

import json
import re
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.slow

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY},
    },
    {"type": "function", "function": {"name": "get_time"}},
]
MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]
MODEL = "headwater-tiny"


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    age: int


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        yield client


def create(client, **fields):
    return client.chat.completions.create(
        **{"model": MODEL, "messages": MESSAGES, "max_tokens": 600, "seed": 3, **fields}
    )


def test_a_required_call_is_one_of_the_tools(client):
    """Whatever the model would generate, the answer is calls with arguments of their schema."""
    for seed in range(4):
        answer = create(client, tools=TOOLS, tool_choice="required", seed=seed)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "get_weather":
                assert arguments["city"] in ("Rome", "Paris")
                assert 1 <= arguments["days"] <= 9
            else:
                assert call.function.name == "get_time"
                assert arguments == {}


def test_a_named_call_is_that_tool_once(client):
    """With `parallel_tool_calls` false and a name, there is exactly one call."""
    named = {"type": "function", "function": {"name": "get_time"}}
    calls = create(client, tools=TOOLS, tool_choice=named).choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["get_time"]
    for seed in range(3):
        answer = create(
            client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert len(answer.choices[0].message.tool_calls) == 1


def test_streamed_calls_are_the_whole_ones(client):
    """The client's own accumulator gives the same calls, with usage and logprobs."""
    fields = {"tools": TOOLS, "tool_choice": "required", "logprobs": True}
    whole = create(client, **fields).choices[0]
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, max_tokens=600, seed=3, **fields
    ) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    # On a busy machine one event has the tokens of several steps, so only a lower bound is certain.
    assert kinds.count("tool_calls.function.arguments.delta") >= len(whole.message.tool_calls)
    assert [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls] == [
        (c.function.name, c.function.arguments) for c in whole.message.tool_calls
    ]
    assert streamed.finish_reason == "tool_calls"
    assert len(streamed.logprobs.content) == len(whole.logprobs.content)


def test_a_tool_loop_finds_its_history_in_the_cache(client):
    """Calls and results pass through the template again; a call has the tokens it was generated
    with."""
    messages = [{"role": "system", "content": "You are terse. " * 20}, *MESSAGES]
    before = 0
    for turn in range(4):
        answer = create(
            client, messages=messages, tools=TOOLS, tool_choice="required", seed=turn
        )
        details = answer.usage.prompt_tokens_details
        # Everything except the new message and the partial block before it.
        assert details.cached_tokens >= before - 64
        before = answer.usage.prompt_tokens + answer.usage.completion_tokens
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            for call in message.tool_calls
        ]


def test_without_tool_choice_the_output_is_not_constrained(client):
    """`auto` and `none` constrain nothing; text that is not a call is content."""
    for choice in ("auto", "none"):
        message = (
            create(client, tools=TOOLS, tool_choice=choice, max_tokens=20).choices[0].message
        )
        assert message.content
        assert message.tool_calls is None


def test_parse_gives_the_clients_own_type(client):
    """`response_format` comes from a pydantic class; the answer is whole or streamed."""
    fields = {"model": MODEL, "messages": MESSAGES, "response_format": Animal, "seed": 1}
    parsed = client.chat.completions.parse(**fields, max_tokens=400).choices[0].message.parsed
    assert isinstance(parsed, Animal)
    with client.chat.completions.stream(**fields, max_tokens=400) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_every_way_to_constrain_an_answer_works(client):
    """vLLM's fields and OpenAI's work, in chat and in completions."""
    ways = [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": "c{2}d"}, "ccd"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
        ({"guided_json": {"enum": [1, 2]}}, r"\s*[12]\s*"),
    ]
    for extra, pattern in ways:
        chat = create(client, extra_body=extra).choices[0].message.content
        assert re.fullmatch(pattern, chat), (extra, chat)
        text = (
            client.completions.create(model=MODEL, prompt="a", max_tokens=50, extra_body=extra)
            .choices[0]
            .text
        )
        assert re.fullmatch(pattern, text), (extra, text)


def test_a_stop_string_and_several_choices_work_with_a_grammar(client):
    """Each choice follows the grammar; a stop string ends it earlier."""
    extra = {"structured_outputs": {"regex": "[ab]{6}END[cd]{6}"}}
    answer = create(client, extra_body=extra, n=3, stop=["END"])
    assert all(re.fullmatch("[ab]{6}", c.message.content) for c in answer.choices)


def test_reasoning_is_a_field_of_its_own(client):
    """If the template opens the reasoning, the reasoning is split off, counted and streamed."""
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = create(client, extra_body=extra, max_tokens=30)
    message = answer.choices[0].message
    assert message.reasoning_content == message.reasoning
    assert message.content == ""
    assert answer.usage.completion_tokens_details.reasoning_tokens == 30
    chunks = create(client, extra_body=extra, max_tokens=30, stream=True)
    streamed = "".join(
        c.choices[0].delta.reasoning_content or ""
        for c in chunks
        if c.choices and hasattr(c.choices[0].delta, "reasoning_content")
    )
    assert streamed == message.reasoning_content
    hidden = create(client, extra_body={**extra, "include_reasoning": False}, max_tokens=30)
    assert not hasattr(hidden.choices[0].message, "reasoning_content")


def test_a_schema_that_is_not_supported_is_a_400(client):
    """The message has the validator's words and the field's name."""
    schema = {"type": "object", "unevaluatedProperties": False, "not": {}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="Unimplemented") as refused:
        create(client, response_format=wanted)
    assert refused.value.param == "response_format"
