"""Converts a request in Anthropic's format to a chat request, so that one path serves both."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from headwater.server.errors import RequestRefused
from headwater.server.messages_schema import (
    CacheControl,
    ContentBlock,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
)
from headwater.server.params import conversation_start, session_name
from headwater.server.parsing.base import write_json
from headwater.server.schema import (
    CalledFunction,
    ChatRequest,
    FunctionFields,
    FunctionName,
    JsonSchemaFormat,
    Message,
    MessageToolCall,
    NamedToolChoice,
    ResponseFormat,
    ReturnsIn,
    ToolFields,
)

T = TypeVar("T")

_HOUR = ReturnsIn(returns_in_s=(3600.0 - 30.0) / 2)
"""Hint that keeps a session for an hour: the cache keeps a session for twice its announced
return time plus 30 s."""

_BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with a block that changes with every request. The block
is left out of the prompt; otherwise nothing after it would ever hit the cache."""


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """The same request for the chat endpoint. Raises RequestRefused for content that is not
    supported."""
    chat = ChatRequest(
        model=body.model,
        messages=[*_system(body.system), *_messages(body.messages)],
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        response_format=_response_format(body),
        chat_template_kwargs=_template_settings(body),
    )
    if body.output_config is not None:
        chat.reasoning_effort = body.output_config.effort
    _add_tool_choice(chat, body.tool_choice)
    if isinstance(body, MessagesRequest):
        _add_sampling(chat, body)
    return chat


def _add_sampling(chat: ChatRequest, body: MessagesRequest) -> None:
    chat.max_tokens = body.max_tokens
    chat.stop = body.stop_sequences
    chat.stream = body.stream
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.seed, chat.priority = body.seed, body.priority
    chat.cache_salt, chat.cache_details = body.cache_salt, body.cache_details
    chat.request_id, chat.continue_choices = body.request_id, body.continue_choices
    user = None if body.metadata is None else body.metadata.user_id
    chat.session_id, chat.user = body.session_id, user
    chat.cache_hint = body.cache_hint
    controls = list(_cache_controls(body))
    if controls and chat.cache_hint is None:
        # The client will send this prefix again: within an hour or, without a time, within the
        # five minutes for which a pending session is kept.
        is_long = any(control.ttl == "1h" for control in controls)
        chat.session_id = session_name(chat) or conversation_start(chat.messages)
        chat.cache_hint = _HOUR if is_long else "pending"


def _cache_controls(body: MessagesRequest) -> Iterator[CacheControl]:
    blocks = list(body.system) if isinstance(body.system, list) else []
    for message in body.messages:
        if isinstance(message.content, list):
            blocks += message.content
    found = [body.cache_control, *(block.cache_control for block in blocks)]
    found += [tool.cache_control for tool in body.tools or ()]
    return (control for control in found if control is not None)


def _system(system: str | list[ContentBlock] | None) -> list[Message]:
    if not system:
        return []
    text = system if isinstance(system, str) else _texts(system)
    return [Message(role="system", content=text)] if text else []


def _texts(blocks: Sequence[ContentBlock]) -> str:
    texts = [_text(block) for block in blocks]
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def _text(block: ContentBlock) -> str:
    if block.type != "text":
        raise RequestRefused(
            f"content of type {block.type[:40]!r} is not supported; send text only",
            param="messages",
        )
    return _required(block.text, block, "text")


def _messages(messages: Sequence[MessageParam]) -> list[Message]:
    return [made for message in messages for made in _message(message)]


def _message(message: MessageParam) -> list[Message]:
    """One message, or one tool message for each result and one for the text between them."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    if message.role == "assistant":
        return [_assistant(message.content)]
    made: list[Message] = []
    for is_result, blocks in groupby(
        message.content, lambda block: block.type == "tool_result"
    ):
        if is_result:
            made += [_tool_result(block) for block in blocks]
        else:
            content = "\n\n".join(_text(block) for block in blocks)
            made.append(Message(role=message.role, content=content))
    return made or [Message(role=message.role, content="")]


def _assistant(blocks: Sequence[ContentBlock]) -> Message:
    texts: list[str] = []
    calls: list[MessageToolCall] = []
    reasoning: list[str] = []
    for block in blocks:
        if block.type == "tool_use":
            calls.append(_call(block))
        elif block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            texts.append(_text(block))
    return Message(
        role="assistant",
        content="".join(texts),
        tool_calls=calls or None,
        reasoning_content="".join(reasoning) or None,
    )


def _call(block: ContentBlock) -> MessageToolCall:
    function = CalledFunction(
        name=_required(block.name, block, "name"), arguments=write_json(block.input or {})
    )
    return MessageToolCall(id=block.id, function=function)


def _tool_result(block: ContentBlock) -> Message:
    content = block.content
    text = _texts(content) if isinstance(content, list) else content or ""
    return Message(
        role="tool",
        content=text,
        tool_call_id=_required(block.tool_use_id, block, "tool_use_id"),
    )


def _required(value: T | None, block: ContentBlock, name: str) -> T:
    if value is None:
        raise RequestRefused(f"a {block.type} block needs {name}", param="messages")
    return value


def _tool(tool: MessagesTool) -> ToolFields:
    if tool.type not in (None, "custom"):
        raise RequestRefused(
            f"the tool {tool.name!r} of type {tool.type!r} runs on Anthropic's servers; only "
            "tools that the client runs are supported",
            param="tools",
        )
    return ToolFields(
        function=FunctionFields(
            name=tool.name, description=tool.description, parameters=tool.input_schema
        )
    )


def _add_tool_choice(chat: ChatRequest, choice: MessagesToolChoice | None) -> None:
    if choice is None:
        return
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    if choice.type == "tool":
        if choice.name is None:
            raise RequestRefused("tool_choice of type tool needs a name", param="tool_choice")
        chat.tool_choice = NamedToolChoice(function=FunctionName(name=choice.name))
    elif choice.type == "any":
        chat.tool_choice = "required"
    else:
        chat.tool_choice = choice.type


def _response_format(body: CountTokensRequest) -> ResponseFormat | None:
    wanted = body.output_format
    if wanted is None and body.output_config is not None:
        wanted = body.output_config.format
    if wanted is None:
        return None
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchemaFormat(schema=wanted.schema)
    )


def _template_settings(body: CountTokensRequest) -> dict[str, Any] | None:
    if body.thinking is None:
        return None
    return {"enable_thinking": body.thinking.type != "disabled"}
