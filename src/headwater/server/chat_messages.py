"""Chat messages as the chat template takes them: plain dicts whose content is text."""

import contextlib
from collections.abc import Sequence
from typing import Any

from headwater.server.errors import RequestRefused
from headwater.server.parsing.base import read_json
from headwater.server.schema import ChatRequest, Message, MessageToolCall


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as dicts. Raises RequestRefused for content that is not text."""
    return [_plain(message) for message in messages]


def template_settings(body: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template that the client sets."""
    settings = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        settings.setdefault("reasoning_effort", body.reasoning_effort)
    return settings


def num_characters(messages: Sequence[dict[str, Any]]) -> int:
    """Characters of all messages, before the template adds to them."""
    return sum(len(message["content"]) for message in messages)


def plain_call(name: str, arguments: str, call_id: str | None) -> dict[str, Any]:
    """A call in the history. Templates write arguments as JSON, so they are given as values."""
    value: object = arguments
    with contextlib.suppress(ValueError):  # what is no JSON is shown as it came
        value = read_json(arguments)
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": value},
    }
    return call if call_id is None else {"id": call_id, **call}


def _plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _text(message)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [_plain_tool_call(call) for call in message.tool_calls]
    return plain


def _plain_tool_call(call: MessageToolCall) -> dict[str, Any]:
    return plain_call(call.function.name, call.function.arguments, call.id)


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type == "text" and part.text is None:
            raise RequestRefused(
                "a message part of type 'text' has no text field", param="messages"
            )
        if part.type != "text":
            raise RequestRefused(
                f"a message part has the type {part.type[:40]!r}; only 'text' is supported",
                param="messages",
            )
    return "".join(part.text or "" for part in message.content)
