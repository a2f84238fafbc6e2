"""The tool formats that write calls as JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek, Kimi."""

import json
import re
from collections.abc import Sequence

from headwater.server.parsing.base import (
    OutputParser,
    Terminal,
    ToolCall,
    ToolSpec,
    call_of,
    openai_id,
    read_json,
    write_json,
)
from headwater.server.parsing.blocks import (
    BlockMarkers,
    BlockParser,
    ReadBlock,
    one_call,
    several_calls,
)
from headwater.server.parsing.lark import arguments_rule, calls_grammar, json_call, quoted

_NAME = r"[\w.\-]+"
_MISTRAL_CALL = re.compile(rf"\s*({_NAME})(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(\{{.*)", re.S)
_DEEPSEEK_BLOCK = re.compile(
    rf"\s*function<｜tool▁sep｜>({_NAME})\s*```json\s*(.*?)\s*```\s*", re.S
)
_DEEPSEEK_PLAIN = re.compile(rf"\s*({_NAME})<｜tool▁sep｜>(.*)", re.S)
_KIMI_CALL = re.compile(
    rf"\s*((?:functions\.)?({_NAME}?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>(.*)", re.S
)


class HermesFormat:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5 and 3, built-in."""

    markers: Sequence[str] = ("<tool_call>", "</tool_call>")
    writes_reasoning = False

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        markers = BlockMarkers(opening="<tool_call>", closing="</tool_call>")
        return BlockParser(markers, _read_object)

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        opening, closing = terminal("<tool_call>"), terminal("</tool_call>")

        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            body, rules = json_call(index, tool, arguments_key="arguments")
            return f'{opening} "\\n" {body} "\\n" {closing}', rules

        return calls_grammar(tools, write, parallel=parallel, separator='"\\n"')

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        return "", ""

    def new_id(self, random_hex: str) -> str:
        return openai_id(random_hex)


class Llama3Format:
    """`{"name": …, "parameters": …}` and nothing else, several with `;` between them."""

    markers: Sequence[str] = ("<|python_tag|>",)
    writes_reasoning = False

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        markers = BlockMarkers(opening="<|python_tag|>", opens_at_brace=True)
        return BlockParser(markers, _read_objects)

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            return json_call(index, tool, arguments_key="parameters")

        return calls_grammar(tools, write, parallel=parallel, separator='"; "')

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        return "", ""

    def new_id(self, random_hex: str) -> str:
        return openai_id(random_hex)


class MistralFormat:
    """`[TOOL_CALLS]` and a list of calls, or before each call its name and `[ARGS]`."""

    markers: Sequence[str] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    writes_reasoning = False

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        return BlockParser(BlockMarkers(opening="[TOOL_CALLS]"), _read_mistral)

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            return json_call(index, tool, arguments_key="arguments")

        around = (f'{terminal("[TOOL_CALLS]")} "["', '"]"')
        return calls_grammar(tools, write, parallel=parallel, separator='", "', around=around)

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        return "", ""

    def new_id(self, random_hex: str) -> str:
        return random_hex[:9]  # the chat templates refuse any other length


class DeepSeekFormat:
    """DeepSeek V3 and R1 write a fenced JSON block, V3.1 and later the bare object."""

    markers: Sequence[str] = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )
    writes_reasoning = False

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        first, last, opening, closing, _ = self.markers
        markers = BlockMarkers(opening=opening, closing=closing, wrapping=(first, last))
        return BlockParser(markers, _read_deepseek)

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        first, last, opening, closing, between = (terminal(mark) for mark in self.markers)

        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            rule = arguments_rule(f"args_{index}", tool.parameters)
            body = f"{opening} {quoted(tool.name)} {between} args_{index} {closing}"
            return body, [rule]

        return calls_grammar(tools, write, parallel=parallel, around=(first, last))

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        return "", ""

    def new_id(self, random_hex: str) -> str:
        return openai_id(random_hex)


class KimiFormat:
    """Kimi K2: a section of calls, each with an id that holds its name."""

    markers: Sequence[str] = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    )
    writes_reasoning = False

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        first, last, opening, closing, _ = self.markers
        markers = BlockMarkers(opening=opening, closing=closing, wrapping=(first, last))
        return BlockParser(markers, _read_kimi)

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        first, last, opening, closing, between = (terminal(mark) for mark in self.markers)

        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            rule = arguments_rule(f"args_{index}", tool.parameters)
            name = f"{quoted(f'functions.{tool.name}:')} /[0-9]/"
            return f"{opening} {name} {between} args_{index} {closing}", [rule]

        return calls_grammar(tools, write, parallel=parallel, around=(first, last))

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        return "", ""

    def new_id(self, random_hex: str) -> str:
        return openai_id(random_hex)


def _read_object(text: str) -> ReadBlock | None:
    try:
        return one_call(call_of(read_json(text)))
    except ValueError:
        return None


def _read_objects(text: str) -> ReadBlock | None:
    """Objects with `;` between them."""
    decoder = json.JSONDecoder()
    calls: list[ToolCall | None] = []
    rest = text.strip()
    try:
        while rest:
            value, end = decoder.raw_decode(rest)
            calls.append(call_of(value))
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
    except (ValueError, RecursionError):
        return None
    return several_calls(calls)


def _read_mistral(text: str) -> ReadBlock | None:
    match = _MISTRAL_CALL.fullmatch(text)
    try:
        if match is None:
            value, end = json.JSONDecoder().raw_decode(text.strip())
            calls = value if isinstance(value, list) else [value]
            return several_calls([call_of(call) for call in calls], text.strip()[end:])
        body = match.group(3)
        value, end = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError):
        return None
    call = call_of({"name": match.group(1), "arguments": value, "id": match.group(2)})
    return several_calls([call], body[end:])


def _read_deepseek(text: str) -> ReadBlock | None:
    match = _DEEPSEEK_BLOCK.fullmatch(text) or _DEEPSEEK_PLAIN.fullmatch(text)
    return None if match is None else _named_call(match.group(1), match.group(2))


def _read_kimi(text: str) -> ReadBlock | None:
    match = _KIMI_CALL.fullmatch(text)
    if match is None:
        return None
    return _named_call(match.group(2), match.group(3), call_id=match.group(1))


def _named_call(name: str, arguments: str, *, call_id: str = "") -> ReadBlock | None:
    try:
        value = read_json(arguments)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    return one_call(ToolCall(name=name, arguments=write_json(value), id=call_id))
