"""The tool formats that write arguments one by one between tags: GLM and Qwen 3 Coder."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwater.server.parsing.base import (
    OutputParser,
    Terminal,
    ToolCall,
    ToolSpec,
    openai_id,
    read_json,
    write_json,
)
from headwater.server.parsing.blocks import BlockMarkers, BlockParser, ReadBlock, one_call
from headwater.server.parsing.lark import calls_grammar, quoted, tagged_arguments

_BLOCK = BlockMarkers(opening="<tool_call>", closing="</tool_call>")
_GLM_CALL = re.compile(r"\s*([\w.\-]+)\s*((?:<arg_key>.*)?)", re.S)
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.S
)
_QWEN_CALL = re.compile(r"\s*<function=([\w.\-]+)>(.*)</function>\s*", re.S)
_QWEN_ARGUMENT = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.S)


class GlmFormat:
    """GLM 4.5 and later: `<arg_key>` and `<arg_value>` for each argument."""

    markers: Sequence[str] = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    writes_reasoning = False

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        return BlockParser(_BLOCK, lambda text: _read(text, tools, _GLM_CALL, _GLM_ARGUMENT))

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        opening, closing = terminal("<tool_call>"), terminal("</tool_call>")

        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            arguments, rules = tagged_arguments(
                index,
                tool,
                before=lambda key: f"<arg_key>{key}</arg_key>\n",
                between="<arg_value>",
                after="</arg_value>\n",
            )
            return f"{opening} {quoted(tool.name + chr(10))} {arguments} {closing}", rules

        if any(terminal(marker)[0] != '"' for marker in self.markers[2:]):
            return None  # tags that are special tokens cannot be inside quoted text
        return calls_grammar(tools, write, parallel=parallel, separator='"\\n"')

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        return "", ""

    def new_id(self, random_hex: str) -> str:
        return openai_id(random_hex)


class QwenCoderFormat:
    """Qwen 3 Coder: `<function=…>` around `<parameter=…>` for each argument."""

    markers: Sequence[str] = ("<tool_call>", "</tool_call>")
    writes_reasoning = False

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        return BlockParser(_BLOCK, lambda text: _read(text, tools, _QWEN_CALL, _QWEN_ARGUMENT))

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        opening, closing = terminal("<tool_call>"), terminal("</tool_call>")

        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            arguments, rules = tagged_arguments(
                index,
                tool,
                before=lambda key: f"<parameter={key}>\n",
                between="",
                after="\n</parameter>\n",
            )
            head = quoted(f"\n<function={tool.name}>\n")
            return f'{opening} {head} {arguments} "</function>\\n" {closing}', rules

        return calls_grammar(tools, write, parallel=parallel, separator='"\\n"')

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        return "", ""

    def new_id(self, random_hex: str) -> str:
        return openai_id(random_hex)


def _read(
    text: str, tools: Sequence[ToolSpec], call: re.Pattern[str], argument: re.Pattern[str]
) -> ReadBlock | None:
    match = call.fullmatch(text)
    if match is None:
        return None
    name, body = match.groups()
    pairs = argument.findall(body)
    if argument.sub("", body).strip():
        return None  # there is text between the arguments
    schemas = _properties(name, tools)
    arguments = {key.strip(): _value(text, schemas.get(key.strip())) for key, text in pairs}
    return one_call(ToolCall(name=name, arguments=write_json(arguments)))


def _properties(name: str, tools: Iterable[ToolSpec]) -> Mapping[str, Any]:
    found = next((tool.parameters for tool in tools if tool.name == name), {})
    properties = found.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _value(text: str, schema: object) -> Any:  # noqa: ANN401 -- any JSON value
    """Text if the schema says so; otherwise the JSON value, or text if it is not JSON."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return read_json(text)
    except ValueError:
        return text
