"""Types shared by all parsers and tool formats."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Terminal = Callable[[str], str]
"""Writes a marker as a term of a Lark grammar: a special token's id, or quoted text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made."""

    name: str
    arguments: str
    """A JSON object, as text."""

    id: str = ""
    """The model's own name for the call; empty if its format has none."""


@dataclass(slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(slots=True)
class CallStart:
    """A call begins. Its arguments follow, then its end, with nothing else in between."""

    name: str
    id: str = ""


@dataclass(slots=True)
class ArgumentsDelta:
    """More of the JSON text of the call's arguments."""

    text: str


@dataclass(slots=True)
class CallEnd:
    """The call is complete, or turned out to be malformed."""

    malformed: str = ""
    """The text of a malformed call; empty if the call is complete."""


OutputDelta = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallEnd


@dataclass(slots=True)
class ParsedOutput:
    """The result of one piece of the stream, in order. Adjacent texts of one kind are one delta."""

    deltas: list[OutputDelta] = field(default_factory=list)

    def add_content(self, text: str) -> None:
        """Append text of the answer."""
        self._grow(ContentDelta, text)

    def add_reasoning(self, text: str) -> None:
        """Append reasoning."""
        self._grow(ReasoningDelta, text)

    def add_arguments(self, text: str) -> None:
        """Append to the arguments of the call that has begun."""
        self._grow(ArgumentsDelta, text)

    def add_call(self, call: ToolCall) -> None:
        """Append a complete call."""
        self.deltas.append(CallStart(call.name, call.id))
        self.add_arguments(call.arguments)
        self.deltas.append(CallEnd())

    def add(self, other: "ParsedOutput") -> None:
        """Append a later result."""
        for delta in other.deltas:
            if isinstance(delta, CallStart | CallEnd):
                self.deltas.append(delta)
            else:
                self._grow(type(delta), delta.text)

    def _grow(
        self, kind: type[ContentDelta] | type[ReasoningDelta] | type[ArgumentsDelta], text: str
    ) -> None:
        last = self.deltas[-1] if self.deltas else None
        if isinstance(last, kind):
            last.text += text
        elif text:
            self.deltas.append(kind(text))


@dataclass(slots=True)
class ParsedAnswer:
    """The output of one choice. A malformed call is content here."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    _open: CallStart | None = field(default=None, compare=False)
    _arguments: list[str] = field(default_factory=list, compare=False)

    def add(self, parsed: ParsedOutput) -> None:
        """Append a later result."""
        for delta in parsed.deltas:
            match delta:
                case ContentDelta():
                    self.content += delta.text
                case ReasoningDelta():
                    self.reasoning += delta.text
                case CallStart():
                    self._open, self._arguments = delta, []
                case ArgumentsDelta():
                    self._arguments.append(delta.text)
                case CallEnd():
                    self._end_call(delta)

    def _end_call(self, end: CallEnd) -> None:
        start, self._open = self._open, None
        assert start is not None, "a call ends after it began"
        if end.malformed:
            self.content += end.malformed
        else:
            arguments = "".join(self._arguments)
            self.calls.append(ToolCall(name=start.name, arguments=arguments, id=start.id))


class OutputParser(Protocol):
    """Reads the text of one choice. Used by one task; `end` is called once, last."""

    @property
    def num_malformed(self) -> int:
        """Calls that could not be parsed and were emitted as content."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the stream is inside the reasoning."""

    def feed(self, text: str) -> ParsedOutput:
        """Add `text` and return what is final."""

    def end(self) -> ParsedOutput:
        """The rest, when the stream has ended."""


class ToolFormat(Protocol):
    """How one family of models writes tool calls."""

    markers: Sequence[str]
    """Special tokens whose text must reach the parser."""

    writes_reasoning: bool
    """Whether every answer has this format, with or without calls, so that its parser also
    splits off the reasoning."""

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        """A parser for one choice."""

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        """Lark rules whose `calls` is one call of `tools`, or several if `parallel`. None if
        the format cannot be forced."""

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        """Terms before a constrained answer, and the rules that they use. Called only if the
        format `writes_reasoning`."""

    def new_id(self, random_hex: str) -> str:
        """An id for a call whose format has none, from 32 random hexadecimal digits."""


class CallsOnlyFormat:
    """Base class of tool formats in which an answer without calls is plain text."""

    writes_reasoning = False

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        return "", ""

    def new_id(self, random_hex: str) -> str:
        return openai_id(random_hex)


def read_json(text: str) -> Any:  # noqa: ANN401 -- any JSON value
    """The value of a JSON text. Raises ValueError for anything else, including NaN."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def write_json(value: object) -> str:
    """JSON as chat templates write it, so that a call in the history has the same tokens."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text):
        return text
    return json.dumps(value)  # half a surrogate pair cannot be sent as UTF-8


def call_of(value: object) -> ToolCall | None:
    """The call in a JSON object with a name and arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict) or not value["name"]:
        return None
    given = value.get("id")
    return ToolCall(
        name=value["name"],
        arguments=write_json(arguments),
        id=given if isinstance(given, str) else "",
    )


def named_call(name: str, arguments: str, *, call_id: str = "") -> ToolCall | None:
    """The call of `name` with these arguments; None if they are not a JSON object."""
    try:
        value = read_json(arguments)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    return ToolCall(name=name, arguments=write_json(value), id=call_id)


def openai_id(random_hex: str) -> str:
    """A call id in OpenAI's format."""
    return "call_" + random_hex[:24]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
