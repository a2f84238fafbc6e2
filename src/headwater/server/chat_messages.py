"""Chat messages as the chat template takes them: plain dicts whose content is text."""

from collections.abc import Sequence
from typing import Any

from headwater.server.errors import RequestRefused
from headwater.server.schema import Message


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as dicts. Raises RequestRefused for content that is not text."""
    return [_plain(message) for message in messages]


def num_characters(messages: Sequence[dict[str, Any]]) -> int:
    """Characters of all messages, before the template adds to them."""
    return sum(len(message["content"]) for message in messages)


def _plain(message: Message) -> dict[str, Any]:
    if message.tool_calls not in (None, []):
        raise RequestRefused(
            "a message has tool_calls, which this server does not support", param="messages"
        )
    plain: dict[str, Any] = {"role": message.role, "content": _text(message)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


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
