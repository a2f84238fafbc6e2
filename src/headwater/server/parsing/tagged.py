"""The tool formats that write arguments one by one between tags: GLM and Qwen 3 Coder."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.server.parsing.base import (
    CallsOnlyFormat,
    CallStart,
    OutputParser,
    Terminal,
    ToolCall,
    ToolSpec,
    read_json,
    write_json,
)
from headwater.server.parsing.blocks import BlockMarkers, BlockParser
from headwater.server.parsing.call_stream import MAX_HEAD_CHARS
from headwater.server.parsing.lark import calls_grammar, quoted, tagged_arguments
from headwater.server.parsing.scanner import MarkerScanner

_BLOCK = BlockMarkers(opening="<tool_call>", closing="</tool_call>")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tags:
    """How a format writes a call."""

    call: re.Pattern[str]
    """A complete call: its name, and its arguments as text."""

    argument: re.Pattern[str]
    """One complete argument: its key and its value."""

    head: re.Pattern[str]
    """The name, up to the first argument."""

    key: re.Pattern[str]
    """The key of an argument, up to its value."""

    closing: str
    """Ends a value."""

    written_name: str
    """What the grammar writes before the arguments; `{}` stands for the name."""

    written_key: str
    """What the grammar writes before a value; `{}` stands for its key."""

    written_end: str
    """What the grammar writes after a value."""

    last: str = ""
    """A term of the grammar: what follows the last argument."""

    trims_newlines: bool = False
    """Whether a line break at each end of a value is not part of it."""


_GLM = _Tags(
    call=re.compile(r"\s*([\w.\-]+)\s*((?:<arg_key>.*)?)", re.S),
    argument=re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.S),
    head=re.compile(r"\s*([\w.\-]+)\s*(?=<arg_key>)"),
    key=re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.S),
    closing="</arg_value>",
    written_name="{}\n",
    written_key="<arg_key>{}</arg_key>\n<arg_value>",
    written_end="</arg_value>\n",
)
_QWEN = _Tags(
    call=re.compile(r"\s*<function=([\w.\-]+)>(.*)</function>\s*", re.S),
    argument=re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.S),
    head=re.compile(r"\s*<function=([\w.\-]+)>\s*(?=<parameter=)"),
    key=re.compile(r"\s*<parameter=([^>]+)>"),
    closing="</parameter>",
    written_name="\n<function={}>\n",
    written_key="<parameter={}>\n",
    written_end="\n</parameter>\n",
    last='"</function>\\n" ',
    trims_newlines=True,
)


class _TaggedFormat(CallsOnlyFormat):
    """A call between two markers, with the tags of the subclass."""

    tags: _Tags
    markers: Sequence[str] = ("<tool_call>", "</tool_call>")

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        tags = self.tags
        return BlockParser(
            _BLOCK, lambda text: _read(text, tools, tags), lambda: TaggedCallStream(tags, tools)
        )

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        opening, closing = terminal(_BLOCK.opening), terminal(_BLOCK.closing)
        tags = self.tags

        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            arguments, rules = tagged_arguments(
                index, tool, before=tags.written_key.format, after=tags.written_end
            )
            name = quoted(tags.written_name.format(tool.name))
            return f"{opening} {name} {arguments} {tags.last}{closing}", rules

        if any(terminal(marker)[0] != '"' for marker in self.markers[2:]):
            return None  # tags that are special tokens cannot be inside quoted text
        return calls_grammar(tools, write, parallel=parallel, separator='"\\n"')


class GlmFormat(_TaggedFormat):
    """GLM 4.5 and later: `<arg_key>` and `<arg_value>` for each argument."""

    tags = _GLM
    markers: Sequence[str] = (
        *_TaggedFormat.markers,
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )


class QwenCoderFormat(_TaggedFormat):
    """Qwen 3 Coder: `<function=…>` around `<parameter=…>` for each argument."""

    tags = _QWEN


class TaggedCallStream:
    """Arguments between tags, converted to JSON: text as it comes, other values when complete."""

    def __init__(self, tags: _Tags, tools: Sequence[ToolSpec]) -> None:
        self.start: CallStart | None = None
        self._tags = tags
        self._tools = tools
        self._schemas: Mapping[str, Any] = {}
        self._held = ""
        """Text in which the head or the next key is looked for."""
        self._value: _TaggedValue | None = None
        """The argument that is being read."""
        self._separator = "{"

    def feed(self, text: str) -> str:
        pieces: list[str] = []
        while text:
            if self._value is not None:
                text = self._read_value(self._value, text, pieces)
            elif len(self._held) < MAX_HEAD_CHARS:
                self._held += text
                text = self._find_start() if self.start is None else self._find_key(pieces)
            else:
                break
        return "".join(pieces)

    def end(self) -> str:
        return "}" if self._value is None else ""

    def _find_start(self) -> str:
        """Look for the head; returns the text after it."""
        match = self._tags.head.match(self._held, 0, MAX_HEAD_CHARS)
        if match is None or match.group(1) not in {tool.name for tool in self._tools}:
            return ""
        self.start = CallStart(match.group(1))
        self._schemas = _properties(match.group(1), self._tools)
        rest, self._held = self._held[match.end() :], ""
        return rest

    def _find_key(self, pieces: list[str]) -> str:
        """Look for the next argument; returns the text of its value."""
        match = self._tags.key.match(self._held, 0, MAX_HEAD_CHARS)
        if match is None:
            return ""
        key = match.group(1).strip()
        self._value = _TaggedValue(self._tags, self._schemas.get(key))
        pieces += [self._separator, write_json(key), ": ", self._value.opening]
        self._separator = ", "
        rest, self._held = self._held[match.end() :], ""
        return rest

    def _read_value(self, value: "_TaggedValue", text: str, pieces: list[str]) -> str:
        """Add to the value; returns the text after it."""
        found = value.scanner.feed(text)
        for piece, is_closing in found:
            if is_closing:
                pieces.append(value.end())
                self._value = None
                return "".join(later.text for later in found) + value.scanner.end()
            pieces.append(value.add(piece))
        return ""


class _TaggedValue:
    """The value of one argument as it grows."""

    def __init__(self, tags: _Tags, schema: object) -> None:
        self.scanner = MarkerScanner([tags.closing])
        self._schema = schema
        self._is_text = _is_text(schema)
        self._trims = tags.trims_newlines
        self._is_empty = True
        self._newline = ""
        """A line break that is not part of the value if nothing follows it."""
        self._pieces: list[str] = []

    @property
    def opening(self) -> str:
        return '"' if self._is_text else ""

    def add(self, piece: str) -> str:
        """The JSON text of `piece`, the next part of the value."""
        if self._trims:
            piece = self._trimmed(piece)
        if self._is_text:
            return write_json(piece)[1:-1]
        self._pieces.append(piece)
        return ""

    def end(self) -> str:
        """The JSON text that ends the value."""
        return '"' if self._is_text else write_json(_value("".join(self._pieces), self._schema))

    def _trimmed(self, piece: str) -> str:
        if self._is_empty:
            piece, self._is_empty = piece.removeprefix("\n"), False
        piece = self._newline + piece
        self._newline = "\n" if piece.endswith("\n") else ""
        return piece.removesuffix("\n")


def _read(text: str, tools: Sequence[ToolSpec], tags: _Tags) -> ToolCall | None:
    match = tags.call.fullmatch(text)
    if match is None:
        return None
    name, body = match.groups()
    pairs = tags.argument.findall(body)
    if tags.argument.sub("", body).strip():
        return None  # there is text between the arguments
    schemas = _properties(name, tools)
    arguments = {key.strip(): _value(text, schemas.get(key.strip())) for key, text in pairs}
    return ToolCall(name=name, arguments=write_json(arguments))


def _properties(name: str, tools: Iterable[ToolSpec]) -> Mapping[str, Any]:
    found = next((tool.parameters for tool in tools if tool.name == name), {})
    properties = found.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _value(text: str, schema: object) -> Any:  # noqa: ANN401 -- any JSON value
    """Text if the schema says so; otherwise the JSON value, or text if it is not JSON."""
    if _is_text(schema):
        return text
    try:
        return read_json(text)
    except ValueError:
        return text


def _is_text(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"
