"""Reads the text of one choice as content, reasoning and tool calls while it grows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256

from headwater.server.parsing.base import OutputParser, ParsedOutput, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParsing:
    """How the text of an answer is read. The default is that all of it is content."""

    make: Callable[[], OutputParser] | None = None
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that the parser must see."""

    max_calls: int | None = None
    """Calls beyond this are dropped."""

    new_id: Callable[[str], str] = str
    """An id for a call that has none."""


PLAIN_TEXT = AnswerParsing()


class AnswerReader:
    """The parser of one choice, and what is counted beside it."""

    def __init__(self, parsing: AnswerParsing, name: str) -> None:
        """`name` is the choice's own: ids of calls are made from it, so that an instance that
        continues a stream gives the same ones."""
        self._parsing = parsing
        self._parser = None if parsing.make is None else parsing.make()
        self._name = name
        self._num_calls = 0
        self.num_reasoning_tokens = 0

    @property
    def num_malformed(self) -> int:
        return 0 if self._parser is None else self._parser.num_malformed

    def read(self, text: str, num_tokens: int, *, is_end: bool) -> ParsedOutput:
        """What `text`, of so many tokens, adds; `is_end` says that nothing follows."""
        parser = self._parser
        if parser is None:
            return ParsedOutput(content=text)
        was_reasoning = parser.is_reasoning
        parsed = parser.feed(text)
        if was_reasoning or parser.is_reasoning:
            self.num_reasoning_tokens += num_tokens
        if is_end:
            parsed.add(parser.end())
        parsed.calls = [self._named(call) for call in self._allowed(parsed.calls)]
        return parsed

    def _allowed(self, calls: list[ToolCall]) -> list[ToolCall]:
        most = self._parsing.max_calls
        return calls if most is None else calls[: max(most - self._num_calls, 0)]

    def _named(self, call: ToolCall) -> ToolCall:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if call.id:
            return call
        digest = sha256(f"{self._name}:{number}".encode()).hexdigest()[:32]
        return replace(call, id=self._parsing.new_id(digest))
