"""The session of a request, and conversion of Anthropic's and Responses requests."""

import msgspec
import pytest

from headwater.server.errors import RequestRefused
from headwater.server.messages_request import chat_request
from headwater.server.messages_schema import MessagesRequest
from headwater.server.params import session_name
from headwater.server.responses_request import chat_request as responses_chat_request
from headwater.server.responses_schema import ResponsesRequest
from headwater.server.schema import ChatRequest, CompletionRequest, ReturnsIn

TURN = {"role": "user", "content": "hello"}


def chat(**fields) -> ChatRequest:
    return msgspec.convert({"messages": [TURN], **fields}, ChatRequest)


def anthropic(**fields) -> ChatRequest:
    body = {"max_tokens": 5, "messages": [TURN], **fields}
    return chat_request(msgspec.convert(body, MessagesRequest))


def responses(**fields) -> ChatRequest:
    return responses_chat_request(msgspec.convert({"input": "x", **fields}, ResponsesRequest))


def test_the_session_is_named_by_the_first_field_that_is_set():
    """The order is `session_id`, `conversation`, `prompt_cache_key`; without them there is no
    session."""
    assert session_name(chat()) == ""
    assert session_name(chat(prompt_cache_key="k")) == "k"
    assert session_name(chat(prompt_cache_key="k", conversation="c")) == "c"
    assert session_name(chat(session_id="s", prompt_cache_key="k")) == "s"
    assert len(session_name(chat(prompt_cache_key="with a space"))) == 64
    assert session_name(msgspec.convert({"prompt": "a", "user": "u"}, CompletionRequest)) == ""


def test_a_user_has_one_session_for_each_conversation():
    """All turns of a conversation are one session; another beginning is another session."""
    later = [TURN, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    first = session_name(chat(user="me"))
    assert first.startswith("me/")
    assert session_name(chat(user="me", messages=later)) == first
    assert session_name(chat(user="you")) != first
    assert session_name(chat(user="me", messages=[{"role": "user", "content": "x"}])) != first


def test_cache_control_is_a_promise_to_return():
    """The longest time to live counts, at any position; without it there is no hint."""
    block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    short = {"name": "f", "cache_control": {"type": "ephemeral"}}
    assert anthropic().cache_hint is None
    assert anthropic(tools=[short]).cache_hint == "pending"
    both = anthropic(system=[block], tools=[short], metadata={"user_id": "me"})
    assert both.cache_hint == ReturnsIn(returns_in_s=1785.0)
    assert (both.session_id or "").startswith("me/")
    assert anthropic(tools=[short]).session_id


def test_anthropics_blocks_become_messages():
    """Results become tool messages, calls become calls, and the billing block is left out."""
    made = anthropic(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            TURN,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "Look:"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "1",
                        "content": [{"type": "text", "text": "ok"}],
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
    )
    assert [(m.role, m.content) for m in made.messages] == [
        ("system", "Be kind."),
        ("user", "hello"),
        ("assistant", "Look:"),
        ("tool", "ok"),
        ("user", "and?"),
    ]
    call = (made.messages[2].tool_calls or [])[0]
    assert (call.id, call.function.arguments) == ("1", '{"a": 1}')
    assert made.messages[2].reasoning_content == "hm"
    assert (made.tool_choice, made.parallel_tool_calls) == ("required", False)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
        {"tools": [{"name": "web", "type": "web_search_20250305"}]},
        {"tool_choice": {"type": "tool"}},
    ],
)
def test_parts_of_anthropics_format_that_are_not_supported_are_refused(fields):
    """A field that changed nothing would mislead the client."""
    with pytest.raises(RequestRefused):
        anthropic(**fields)


def test_items_of_the_responses_api_become_messages():
    """Consecutive calls form one message; the template handles reasoning."""
    made = responses(
        instructions="Be kind.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {
                "type": "function_call_output",
                "call_id": "2",
                "output": [{"type": "input_text", "text": "two"}],
            },
        ],
        tools=[{"type": "function", "name": "f"}],
        tool_choice={"type": "function", "name": "f"},
        conversation={"id": "c"},
    )
    assert [(m.role, m.content) for m in made.messages] == [
        ("system", "Be kind."),
        ("user", "hello"),
        ("assistant", ""),
        ("tool", "one"),
        ("tool", "two"),
    ]
    assert len(made.messages[2].tool_calls or ()) == 2
    assert session_name(made) == "c"


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"content": "no role"}]},
        {"input": [{"type": "function_call"}]},
        {"input": [{"type": "function_call_output"}]},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "file_search"}},
        {"text": {"format": {"type": "json_schema"}}},
    ],
)
def test_parts_of_the_responses_api_that_are_not_supported_are_refused(fields):
    """A field that changed nothing would mislead the client."""
    with pytest.raises(RequestRefused):
        responses(**fields)
