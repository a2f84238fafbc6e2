"""Converts a request of the Responses API to a chat request, so that one path serves both."""

from collections.abc import Sequence

from headwater.server.chat_prompt import ToolMode
from headwater.server.errors import RequestRefused
from headwater.server.responses_schema import (
    ConversationRef,
    InputItem,
    InputPart,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
    TextFormat,
)
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
    ToolFields,
)

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_request(body: ResponsesRequest, before: Sequence[Message] = ()) -> ChatRequest:
    """The same request for the chat endpoint, after the messages `before`. Raises
    RequestRefused for content that is not supported."""
    if body.background:
        raise RequestRefused("'background' is not supported; leave it out", param="background")
    messages = [*_instructions(body), *before, *_input_messages(body.input)]
    if not messages:
        raise RequestRefused("the input is empty; send at least one message", param="input")
    conversation = body.conversation
    return ChatRequest(
        model=body.model,
        messages=messages,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        max_completion_tokens=body.max_output_tokens,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text.format if body.text else None),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        user=body.user,
        prompt_cache_key=body.prompt_cache_key,
        conversation=conversation.id
        if isinstance(conversation, ConversationRef)
        else conversation,
        cache_salt=body.cache_salt,
        session_id=body.session_id,
        cache_hint=body.cache_hint,
        cache_details=body.cache_details,
        request_id=body.request_id,
        priority=body.priority,
        continue_choices=body.continue_choices,
    )


def _input_messages(given: str | Sequence[InputItem]) -> list[Message]:
    """The input as chat messages. Consecutive calls become one message."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    for item in given:
        _add_item(messages, item)
    return messages


def _instructions(body: ResponsesRequest) -> list[Message]:
    return [Message(role="system", content=body.instructions)] if body.instructions else []


def _add_item(messages: list[Message], item: InputItem) -> None:
    match item.type:
        case None | "message":
            role = "system" if item.role == "developer" else item.role
            if role is None:
                raise RequestRefused("a message needs a role", param="input")
            messages.append(Message(role=role, content=_text(item.content)))
        case "function_call":
            _add_call(messages, item)
        case "function_call_output":
            if item.call_id is None:
                raise RequestRefused("a function_call_output needs call_id", param="input")
            content = _text(item.output)
            messages.append(Message(role="tool", content=content, tool_call_id=item.call_id))
        case "reasoning":
            return  # chat templates remove the reasoning of answers from the history
        case _:
            raise RequestRefused(
                f"an input item has the type {item.type[:40]!r}; only messages, function "
                f"calls and their outputs are supported",
                param="input",
            )


def _add_call(messages: list[Message], item: InputItem) -> None:
    if item.name is None:
        raise RequestRefused("a function_call needs a name", param="input")
    function = CalledFunction(name=item.name, arguments=item.arguments or "{}")
    call = MessageToolCall(id=item.call_id, function=function)
    if messages and messages[-1].role == "assistant":
        last = messages[-1]
        last.tool_calls = last.tool_calls or []
        last.tool_calls.append(call)
    else:
        messages.append(Message(role="assistant", content="", tool_calls=[call]))


def _text(content: str | list[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in (*_TEXT_PARTS, "refusal"):
            raise RequestRefused(
                f"a part of the input has the type {part.type[:40]!r}; only text is supported",
                param="input",
            )
    return "".join(part.text or part.refusal or "" for part in content)


def _tool(tool: ResponsesTool) -> ToolFields:
    if tool.type != "function" or tool.name is None:
        raise RequestRefused(
            f"a tool has the type {tool.type[:40]!r}; only functions with a name are supported",
            param="tools",
        )
    return ToolFields(
        function=FunctionFields(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
    )


def _tool_choice(
    choice: ToolMode | ResponsesToolChoice | None,
) -> ToolMode | NamedToolChoice | None:
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    if choice.type != "function" or choice.name is None:
        raise RequestRefused(
            f"tool_choice of type {choice.type[:40]!r} is not supported; send a mode or a function "
            "with a name",
            param="tool_choice",
        )
    return NamedToolChoice(function=FunctionName(name=choice.name))


def _response_format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ResponseFormat(type="json_object")
    if wanted.schema is None:
        raise RequestRefused(
            "a format of type json_schema needs the field schema", param="text"
        )
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchemaFormat(schema=wanted.schema)
    )
