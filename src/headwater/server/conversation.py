"""Turns a conversation into a prompt, with the grammar and the parser of its answer.

Shared by the three APIs that take conversations: chat completions, responses and messages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.engine.structured import StructuredOutput, check_schema_size
from headwater.errors import RequestError
from headwater.server.chat_prompt import ToolUse
from headwater.server.errors import RequestRefused
from headwater.server.parsing.base import OutputParser, ToolSpec
from headwater.server.parsing.model_output import PLAIN_TEXT, AnswerParsing
from headwater.server.service import Service
from headwater.types import Tokens

_PROMPT_END_CHARS = 64
"""Number of characters at the end of a prompt that show whether it ends inside the
reasoning."""

_MAX_TOOL_BYTES = 1 << 20
"""Maximum number of bytes of the schemas of tools that an answer must call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The content of one request, independent of its API."""

    messages: Sequence[dict[str, Any]]
    """Messages in the form that the chat template takes."""

    tools: ToolUse = field(default_factory=ToolUse)
    structured: StructuredOutput | None = None
    structured_param: str = "response_format"
    """The name of the request field that defines `structured`, for an error about it."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""

    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationPrompt:
    """The input of the engine, and how its answer is parsed."""

    tokens: Tokens
    grammar: str = ""
    parsing: AnswerParsing = PLAIN_TEXT


async def prepare(
    service: Service, read: Callable[[], Conversation], *, num_bytes: int
) -> ConversationPrompt:
    """The prompt of the conversation that `read` reads from a body of `num_bytes`. Raises
    RequestRefused or RequestError.

    Everything that takes longer for a longer conversation runs in a thread.
    """
    prompt, param = await service.in_thread(lambda: _prompt(service, read()), size=num_bytes)
    if prompt.grammar:
        await service.check_grammar(prompt.grammar, param=param)
    return prompt


def _prompt(service: Service, conversation: Conversation) -> tuple[ConversationPrompt, str]:
    """The prompt, and the name of the request field that defines its grammar, for an error."""
    tools = conversation.tools
    _check(service, conversation)
    text = service.tokenizer.chat_text(
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        settings=conversation.settings,
        tools=tools.for_template(),
    )
    tokens = service.tokenizer.encode(
        text, add_special_tokens=False, max_tokens=service.engine.info.max_model_len
    )
    prompt_end = text[-_PROMPT_END_CHARS:]
    prompt = ConversationPrompt(
        tokens=tokens,
        grammar=_grammar(service, conversation, prompt_end),
        parsing=_parsing(service, tools, prompt_end),
    )
    return prompt, "tools" if tools.is_forced else conversation.structured_param


def _check(service: Service, conversation: Conversation) -> None:
    tools = conversation.tools
    if tools.mode == "auto" and service.model_output.tools is None:
        raise RequestRefused(
            "the chat template of this model has no format for tools; set tool_choice to "
            "'required' or to a function, or start the server with --tool-call-parser",
            param="tools",
        )
    if tools.is_forced and conversation.structured is not None:
        raise RequestRefused(
            "a response cannot both be a tool call and follow a format; send only one of "
            f"tool_choice and {conversation.structured_param}",
            param=conversation.structured_param,
        )


def _grammar(service: Service, conversation: Conversation, prompt_end: str) -> str:
    tools, output = conversation.tools, service.model_output
    if tools.is_forced:
        _check_size(tools.callable)
        grammar = output.forced_calls(
            tools.callable, parallel=tools.is_parallel, prompt_end=prompt_end
        )
        if grammar is None:
            raise RequestRefused(
                "this model's tool calls cannot be forced; use tool_choice 'auto'",
                param="tool_choice",
            )
        return grammar
    if conversation.structured is None:
        return ""
    try:
        grammar = conversation.structured.to_grammar()
    except RequestError as exc:
        raise RequestRefused(str(exc), param=conversation.structured_param) from exc
    return output.constrained(grammar, prompt_end=prompt_end)


def _check_size(tools: Sequence[ToolSpec]) -> None:
    """Refuse tools whose schemas are too large for the one grammar of a forced call."""
    try:
        check_schema_size(*(tool.parameters for tool in tools), max_bytes=_MAX_TOOL_BYTES)
    except RequestError as exc:
        raise RequestRefused(str(exc), param="tools") from exc


def _parsing(service: Service, tools: ToolUse, prompt_end: str) -> AnswerParsing:
    output = service.model_output
    specs: Sequence[ToolSpec] = tools.offered if tools.is_used else ()

    def make() -> OutputParser | None:
        return output.parser(specs, is_forced=tools.is_forced, prompt_end=prompt_end)

    if make() is None:
        return PLAIN_TEXT
    return AnswerParsing(
        make=make,  # type: ignore[arg-type]  # the same arguments give a parser each time
        shown_ids=output.shown_ids(specs),
        max_calls=None if tools.is_parallel else 1,
        new_id=output.new_id,
    )
