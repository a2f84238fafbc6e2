"""The types that every parser and every tool format share."""

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
    """What one piece of the stream added."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, other: "ParsedOutput") -> None:
        """Append what came later."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls


class OutputParser(Protocol):
    """Reads the text of one choice. Used by one task; `end` is called once, last."""

    @property
    def num_malformed(self) -> int:
        """Calls that could not be read and were given out as content."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the stream is inside the reasoning."""

    def feed(self, text: str) -> ParsedOutput:
        """What is certain after `text`."""

    def end(self) -> ParsedOutput:
        """What is left when the stream has ended, wherever it ended."""


class ToolFormat(Protocol):
    """How one family of models writes tool calls."""

    markers: Sequence[str]
    """Texts that must reach the parser although the tokenizer calls them special tokens."""

    writes_reasoning: bool
    """Whether every answer is written in this format, with calls or without, and its parser
    splits off the reasoning too."""

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        """A parser for one choice."""

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        """Lark rules whose `calls` is one call of `tools`, or several where `parallel`.

        None if the format cannot be forced.
        """

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        """Terms that come before a constrained answer, and the rules they use; asked only where
        it `writes_reasoning`."""

    def new_id(self, random_hex: str) -> str:
        """An id for a call whose format has none, made of 32 random hexadecimal digits."""


def read_json(text: str) -> Any:  # noqa: ANN401 -- any JSON value
    """The value of a JSON text. Raises ValueError for anything else, NaN included."""
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
    """The call that a JSON object with a name and arguments stands for."""
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
    """The usual shape of a call's id."""
    return "call_" + random_hex[:24]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
