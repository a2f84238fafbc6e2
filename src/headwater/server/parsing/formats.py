"""The tool formats that write calls as JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek, Kimi."""

import re
from collections.abc import Callable, Sequence

from headwater.server.parsing.base import (
    CallsOnlyFormat,
    OutputParser,
    Terminal,
    ToolCall,
    ToolSpec,
    call_of,
    named_call,
    read_json,
)
from headwater.server.parsing.blocks import BlockMarkers, BlockParser
from headwater.server.parsing.call_stream import CallStream, JsonCallStream
from headwater.server.parsing.lark import arguments_rule, calls_grammar, json_call, quoted

_NAME = r"[\w.\-]+"
_OBJECT_HEAD = re.compile(
    rf'[\s\[]*\{{\s*(?:"id"\s*:\s*"(?P<id>\w+)"\s*,\s*)?"name"\s*:\s*"(?P<name>{_NAME})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*\{'
)
"""The text before the arguments in `{"name": …, "arguments": …}`."""

_MISTRAL_HEAD = re.compile(
    rf"\s*(?P<name>{_NAME})(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*\{{"
)
_DEEPSEEK_HEAD = re.compile(
    rf"\s*(?:function<｜tool▁sep｜>)?(?P<name>{_NAME})(?:\s*```json\s*|<｜tool▁sep｜>\s*)\{{"
)
_DEEPSEEK_BLOCK = re.compile(
    rf"\s*function<｜tool▁sep｜>({_NAME})\s*```json\s*(.*?)\s*```\s*", re.S
)
_DEEPSEEK_PLAIN = re.compile(rf"\s*({_NAME})<｜tool▁sep｜>(.*)", re.S)
_KIMI_ID = (
    rf"(?P<id>(?:functions\.)?(?P<name>{_NAME}?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
)
_KIMI_HEAD = re.compile(rf"\s*{_KIMI_ID}\s*\{{")
_KIMI_CALL = re.compile(rf"\s*{_KIMI_ID}(?P<arguments>.*)", re.S)


class HermesFormat(CallsOnlyFormat):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5 and 3, built-in."""

    markers: Sequence[str] = ("<tool_call>", "</tool_call>")

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        markers = BlockMarkers(opening="<tool_call>", closing="</tool_call>")
        return BlockParser(markers, _read_object, _stream_of((_OBJECT_HEAD,), tools))

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        opening, closing = terminal("<tool_call>"), terminal("</tool_call>")

        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            body, rules = json_call(index, tool, arguments_key="arguments")
            return f'{opening} "\\n" {body} "\\n" {closing}', rules

        return calls_grammar(tools, write, parallel=parallel, separator='"\\n"')


class Llama3Format(CallsOnlyFormat):
    """`{"name": …, "parameters": …}` and nothing else, several with `;` between them."""

    markers: Sequence[str] = ("<|python_tag|>",)

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        markers = BlockMarkers(opening="<|python_tag|>", opens_at_brace=True)
        return BlockParser(markers, _read_object, _stream_of((_OBJECT_HEAD,), tools))

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            return json_call(index, tool, arguments_key="parameters")

        return calls_grammar(tools, write, parallel=parallel, separator='"; "')


class MistralFormat(CallsOnlyFormat):
    """`[TOOL_CALLS]` and a JSON list of calls; or for each call `[TOOL_CALLS]`, its name,
    `[ARGS]` and its arguments.

    An id after the arguments is not used: the call has begun by then.
    """

    markers: Sequence[str] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        markers = BlockMarkers(opening="[TOOL_CALLS]")
        stream = _stream_of((_OBJECT_HEAD, _MISTRAL_HEAD), tools)
        return BlockParser(markers, _read_mistral, stream)

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            return json_call(index, tool, arguments_key="arguments")

        around = (f'{terminal("[TOOL_CALLS]")} "["', '"]"')
        return calls_grammar(tools, write, parallel=parallel, separator='", "', around=around)

    def new_id(self, random_hex: str) -> str:
        return random_hex[:9]  # the chat templates refuse any other length


class DeepSeekFormat(CallsOnlyFormat):
    """DeepSeek V3 and R1 write a fenced JSON block, V3.1 and later the bare object."""

    markers: Sequence[str] = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        return _section_parser(self.markers, _read_deepseek, _DEEPSEEK_HEAD, tools)

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        marks = [terminal(mark) for mark in self.markers]
        return _section_grammar(marks, tools, quoted, parallel=parallel)


class KimiFormat(CallsOnlyFormat):
    """Kimi K2: a section of calls, each with an id that holds its name."""

    markers: Sequence[str] = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    )

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        return _section_parser(self.markers, _read_kimi, _KIMI_HEAD, tools)

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        marks = [terminal(mark) for mark in self.markers]
        return _section_grammar(
            marks,
            tools,
            lambda name: f"{quoted(f'functions.{name}:')} /[0-9]/",
            parallel=parallel,
        )


def _section_parser(
    markers: Sequence[str],
    read: Callable[[str], ToolCall | None],
    head: re.Pattern[str],
    tools: Sequence[ToolSpec],
) -> OutputParser:
    """A parser for a section of calls. The markers are those around the section, those around a
    call, and the one between its name and its arguments."""
    first, last, opening, closing, _ = markers
    blocks = BlockMarkers(opening=opening, closing=closing, wrapping=(first, last))
    return BlockParser(blocks, read, _stream_of((head,), tools))


def _section_grammar(
    marks: Sequence[str],
    tools: Sequence[ToolSpec],
    write_name: Callable[[str], str],
    *,
    parallel: bool,
) -> str:
    """The rules of such a section; `marks` are its markers as terms of the grammar."""
    first, last, opening, closing, between = marks

    def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
        rule = arguments_rule(f"args_{index}", tool.parameters)
        call = f"{opening} {write_name(tool.name)} {between} args_{index} {closing}"
        return call, [rule]

    return calls_grammar(tools, write, parallel=parallel, around=(first, last))


def _stream_of(
    heads: Sequence[re.Pattern[str]], tools: Sequence[ToolSpec]
) -> Callable[[], CallStream]:
    names = frozenset(tool.name for tool in tools)
    return lambda: JsonCallStream(heads, names)


def _read_object(text: str) -> ToolCall | None:
    """Read a call of the form `{"name": …, "arguments": …}`."""
    try:
        return call_of(read_json(text))
    except ValueError:
        return None


def _read_mistral(text: str) -> ToolCall | None:
    """Read an object of a list, or a name and the arguments."""
    match = _MISTRAL_HEAD.match(text)
    if match is None:
        return _read_object(text.lstrip().removeprefix("["))
    call_id = match.group("id") or ""
    return named_call(match.group("name"), text[match.end() - 1 :], call_id=call_id)


def _read_deepseek(text: str) -> ToolCall | None:
    match = _DEEPSEEK_BLOCK.fullmatch(text) or _DEEPSEEK_PLAIN.fullmatch(text)
    return None if match is None else named_call(match.group(1), match.group(2))


def _read_kimi(text: str) -> ToolCall | None:
    match = _KIMI_CALL.fullmatch(text)
    if match is None:
        return None
    return named_call(match.group("name"), match.group("arguments"), call_id=match.group("id"))
