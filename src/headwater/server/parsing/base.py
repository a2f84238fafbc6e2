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


@dataclass(slots=True, kw_only=True)
class ParsedOutput:
    """The result of one piece of the stream."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, other: "ParsedOutput") -> None:
        """Append a later result."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls


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


def openai_id(random_hex: str) -> str:
    """The usual format of a call's id."""
    return "call_" + random_hex[:24]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
