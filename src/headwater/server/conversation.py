"""Turns a conversation into a prompt, with the grammar and the parser of its answer.

Shared by the three APIs that take conversations: chat completions, responses and messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.engine.structured import StructuredOutput
from headwater.errors import RequestError
from headwater.server.chat_prompt import ToolUse, num_characters
from headwater.server.errors import RequestRefused
from headwater.server.parsing.base import OutputParser, ToolSpec
from headwater.server.parsing.model_output import PLAIN_TEXT, AnswerParsing
from headwater.server.service import Service
from headwater.types import Tokens

_PROMPT_END_CHARS = 64
"""Number of characters at the end of a prompt that show whether it ends inside the
reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The content of one request, independent of its API."""

    messages: Sequence[dict[str, Any]]
    """In the form of the chat template."""

    tools: ToolUse = field(default_factory=ToolUse)
    structured: StructuredOutput | None = None
    structured_param: str = "response_format"
    """The field that an error about `structured` names."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""

    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationPrompt:
    """The input of the engine, and how its answer is parsed."""

    tokens: Tokens
    grammar: str = ""
    parsing: AnswerParsing = PLAIN_TEXT


async def prepare(service: Service, conversation: Conversation) -> ConversationPrompt:
    """The prompt of a conversation. Raises RequestRefused or RequestError."""
    _check(service, conversation)

    def encode() -> tuple[str, Tokens]:
        text = service.tokenizer.chat_text(
            conversation.messages,
            add_generation_prompt=conversation.add_generation_prompt,
            settings=conversation.settings,
            tools=conversation.tools.for_template(),
        )
        tokens = service.tokenizer.encode(
            text, add_special_tokens=False, max_tokens=service.engine.info.max_model_len
        )
        return text[-_PROMPT_END_CHARS:], tokens

    size = num_characters(conversation.messages)
    prompt_end, tokens = await service.in_thread(encode, size=size)
    grammar = _grammar(service, conversation, prompt_end)
    if grammar:
        param = "tools" if conversation.tools.is_forced else conversation.structured_param
        await service.check_grammar(grammar, param=param)
    parsing = _parsing(service, conversation.tools, prompt_end)
    return ConversationPrompt(tokens=tokens, grammar=grammar, parsing=parsing)


def _check(service: Service, conversation: Conversation) -> None:
    tools = conversation.tools
    if tools.mode == "auto" and service.model_output.tools is None:
        raise RequestRefused(
            "the chat template of this model has no tools; send tool_choice 'required' or a "
            "function's name, or start the server with --tool-call-parser",
            param="tools",
        )
    if tools.is_forced and conversation.structured is not None:
        raise RequestRefused(
            "an answer is either a tool call or follows a format: send only one of "
            f"tool_choice and {conversation.structured_param}",
            param=conversation.structured_param,
        )


def _grammar(service: Service, conversation: Conversation, prompt_end: str) -> str:
    tools, output = conversation.tools, service.model_output
    if tools.is_forced:
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
