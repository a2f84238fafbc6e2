"""Messages and tools of a chat request, in the form that the chat template takes."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headwater.server.errors import RequestRefused
from headwater.server.parsing.base import ToolSpec, read_json
from headwater.server.schema import (
    ChatRequest,
    FunctionFields,
    Message,
    MessageToolCall,
    NamedToolChoice,
    ToolFields,
)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as dicts with text content. Raises RequestRefused for other content."""
    return [_plain(message) for message in messages]


def template_settings(body: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template that the client sets."""
    settings = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        settings.setdefault("reasoning_effort", body.reasoning_effort)
    return settings


def _plain_call(name: str, arguments: str, call_id: str | None) -> dict[str, Any]:
    """A call in the history. Templates write arguments as JSON, so they are given as values."""
    value: object = arguments
    with contextlib.suppress(ValueError):  # text that is not JSON is shown unchanged
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
    return _plain_call(call.function.name, call.function.arguments, call.id)


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type == "text" and part.text is None:
            raise RequestRefused(
                "a message part of type 'text' has no text field; add one", param="messages"
            )
        if part.type != "text":
            raise RequestRefused(
                f"a message part has the type {part.type[:40]!r}; only 'text' is supported",
                param="messages",
            )
    return "".join(part.text or "" for part in message.content)


ToolMode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Which tools the model may call, and whether it must call one."""

    offered: Sequence[ToolSpec] = ()
    """Tools in the prompt, in the client's order: a fixed order keeps the prefix cached."""

    callable: Sequence[ToolSpec] = ()
    """Tools that the answer may call: only one if the client names it."""

    mode: ToolMode = "none"
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode == "required"

    @property
    def is_used(self) -> bool:
        """Whether the answer may contain calls."""
        return self.mode != "none"

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools in the form of chat templates."""
        return [_template_tool(tool) for tool in self.offered] or None


def tool_use(body: ChatRequest) -> ToolUse:
    """The tools of a chat request. Raises RequestRefused if its fields disagree."""
    tools = [_spec_of(tool.function) for tool in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        return _use_of(tools, "required", choice.function.name, body.parallel_tool_calls)
    return _use_of(tools, choice, None, body.parallel_tool_calls)


def _use_of(
    tools: Sequence[ToolSpec], mode: ToolMode | None, name: str | None, parallel: bool | None
) -> ToolUse:
    """How `tools` are used; `name` is the tool that must be called."""
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestRefused("two tools have the same name; rename one", param="tools")
    if not tools:
        if mode == "required" or name is not None:
            raise RequestRefused(
                "tool_choice needs tools; send tools or leave out tool_choice",
                param="tool_choice",
            )
        return ToolUse()
    named = [tool for tool in tools if name is None or tool.name == name]
    if not named:
        raise RequestRefused(
            f"tool_choice names {name!r}, which is not in tools; name one of them",
            param="tools",
        )
    return ToolUse(
        offered=tools,
        callable=named,
        mode=mode or "auto",
        is_parallel=parallel is not False and name is None,
    )


def _spec_of(function: FunctionFields) -> ToolSpec:
    """A function of the request in the form of the parsers."""
    return ToolSpec(
        name=function.name,
        description=function.description or "",
        parameters=function.parameters or {},
    )


def template_tools(tools: Sequence[ToolFields] | None) -> list[dict[str, Any]] | None:
    """The tools of a request in the form of chat templates."""
    return [_template_tool(_spec_of(tool.function)) for tool in tools or ()] or None


def _template_tool(tool: ToolSpec) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = dict(tool.parameters)
    return {"type": "function", "function": function}
