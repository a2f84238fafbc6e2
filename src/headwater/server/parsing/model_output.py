"""How the served model writes its answers: the parser, the grammars that force a form, and the reader
of one choice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from headwater.engine.structured import lark_grammar, with_prefix
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import RequestError
from headwater.server.parsing.base import (
    CallEnd,
    CallStart,
    ContentDelta,
    OutputDelta,
    OutputParser,
    ParsedOutput,
    ToolFormat,
    ToolSpec,
)
from headwater.server.parsing.formats import HermesFormat
from headwater.server.parsing.lark import quoted, special_or_text
from headwater.server.parsing.registry import reasoning_tags, tool_format
from headwater.server.parsing.thinking import PlainParser, ReasoningTags, ThinkingParser

_THOUGHT = r"/(.|\n)*/"
_SPACE = r"/[ \n]{0,4}/"


class ModelOutput:
    """The tool format and the reasoning tags of one model."""

    def __init__(
        self,
        tools: ToolFormat | None,
        tags: ReasoningTags | None,
        special_ids: Mapping[str, int],
        *,
        prompt_opens: bool = False,
    ) -> None:
        """`special_ids` are the ids of the vocabulary's special tokens, by their text.
        `prompt_opens` means that reasoning begins in the prompt or not at all."""
        self.tools = tools
        self.tags = tags
        self._special_ids = special_ids
        self._prompt_opens = prompt_opens
        self._terminal = special_or_text(special_ids)

    @classmethod
    def choose(
        cls, tool_parser: str, reasoning_parser: str, tokenizer: Tokenizer
    ) -> "ModelOutput":
        """The formats that the settings name, or that the chat template uses. Raises
        ConfigError."""
        template = tokenizer.template_source
        tools = tool_format(tool_parser, template)
        tags = reasoning_tags(reasoning_parser, template)
        if tools is not None and tools.writes_reasoning:
            tags = None
        opens = tags is not None and tags.is_open(_thinking_prompt(tokenizer))
        return cls(tools, tags, tokenizer.special_ids, prompt_opens=opens)

    def parser(
        self, tools: Sequence[ToolSpec], *, is_forced: bool, prompt_end: str
    ) -> OutputParser | None:
        """A parser for one choice; None if the whole text is content."""
        made = self._format(is_forced=is_forced) if tools else self.tools
        inner: OutputParser | None = None
        if made is not None and (tools or made.writes_reasoning):
            inner = made.parser(tools)
        if self.tags is None:
            return inner
        is_open = self.tags.is_open(prompt_end)
        return ThinkingParser(self.tags, inner or PlainParser(), is_open=is_open)

    def new_id(self, random_hex: str) -> str:
        """An id for a call that has none."""
        return (self.tools or HermesFormat()).new_id(random_hex)

    def shown_ids(self, tools: Sequence[ToolSpec]) -> frozenset[int]:
        """Special tokens that the parser must see."""
        markers: list[str] = []
        if self.tools is not None and (tools or self.tools.writes_reasoning):
            markers += self.tools.markers
        if self.tags is not None:
            markers += self.tags.markers
        return frozenset(
            self._special_ids[marker] for marker in markers if marker in self._special_ids
        )

    def forced_calls(
        self, tools: Sequence[ToolSpec], *, parallel: bool, prompt_end: str
    ) -> str | None:
        """A grammar of calls, after reasoning if the model reasons; None if the format cannot
        be forced."""
        made = self._format(is_forced=True)
        assert made is not None, "a forced call always has a format"
        rules = made.grammar(tools, parallel=parallel, terminal=self._terminal)
        if rules is None:
            return None
        prefix, others = self._reasoning(prompt_end)
        return lark_grammar("\n".join([f"start: {prefix} calls", rules, *others]))

    def constrained(self, grammar: str, *, prompt_end: str) -> str:
        """`grammar` for the answer, after reasoning if the model reasons."""
        if self.tools is not None and self.tools.writes_reasoning:
            prefix, rules = self.tools.answer_prefix(self._terminal)
            return with_prefix(grammar, prefix, rules)
        prefix, others = self._reasoning(prompt_end)
        return with_prefix(grammar, prefix, "\n".join(others)) if prefix else grammar

    def _format(self, *, is_forced: bool) -> ToolFormat | None:
        """The tool format. A model that has none but must call uses one that is easy to
        parse."""
        return HermesFormat() if self.tools is None and is_forced else self.tools

    def _reasoning(self, prompt_end: str) -> tuple[str, list[str]]:
        """Terms for the reasoning before an answer, and the rules they use."""
        tags = self.tags
        if tags is None or (self._prompt_opens and not tags.is_open(prompt_end)):
            return "", []
        closing = self._terminal(tags.closing)
        if closing == quoted(tags.closing):
            rules = [f"thought[suffix={closing}]: {_THOUGHT}"]
            end = f"thought {_SPACE}"
        else:
            rules = [f"thought: {_THOUGHT}"]
            end = f"thought {closing} {_SPACE}"
        if tags.is_open(prompt_end):
            return end, rules
        return f"({self._terminal(tags.opening)} {end})?", rules


def _thinking_prompt(tokenizer: Tokenizer) -> str:
    """A short prompt that asks for reasoning in the usual way; empty if that is not
    possible."""
    try:
        return tokenizer.chat_text(
            [{"role": "user", "content": "?"}], settings={"enable_thinking": True}
        )
    except RequestError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParsing:
    """How the text of an answer is parsed. By default all of it is content."""

    make: Callable[[], OutputParser] | None = None
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that the parser must see."""

    max_calls: int | None = None
    """Calls beyond this are dropped."""

    new_id: Callable[[str], str] = str
    """An id for a call that has none."""


PLAIN_TEXT = AnswerParsing()


class AnswerReader:
    """Splits the growing text of one choice into content, reasoning and tool calls, and counts."""

    def __init__(self, parsing: AnswerParsing, name: str) -> None:
        """`name` identifies the choice. Ids of calls are made from it, so that an instance that
        continues a stream creates the same ids."""
        self._parsing = parsing
        self._parser = None if parsing.make is None else parsing.make()
        self._name = name
        self._num_calls = 0
        """Calls that were emitted, malformed ones included."""
        self._num_complete = 0
        self._drops = False
        """Whether the open call is beyond the limit."""
        self.num_reasoning_tokens = 0

    @property
    def num_malformed(self) -> int:
        return 0 if self._parser is None else self._parser.num_malformed

    def read(self, text: str, num_tokens: int, *, is_end: bool) -> ParsedOutput:
        """The result of `text`, which has this many tokens; `is_end` means that nothing
        follows."""
        parser = self._parser
        if parser is None:
            return ParsedOutput([ContentDelta(text)] if text else [])
        was_reasoning = parser.is_reasoning
        parsed = parser.feed(text)
        if was_reasoning or parser.is_reasoning:
            self.num_reasoning_tokens += num_tokens
        if is_end:
            parsed.add(parser.end())
        allowed = (self._allowed(delta) for delta in parsed.deltas)
        parsed.deltas = [self._named(delta) for delta in allowed if delta is not None]
        return parsed

    def _allowed(self, delta: OutputDelta) -> OutputDelta | None:
        """The delta to emit: None for a call beyond the limit."""
        most = self._parsing.max_calls
        if isinstance(delta, CallStart):
            self._drops = most is not None and self._num_complete >= most
        if not self._drops:
            self._num_complete += isinstance(delta, CallEnd) and not delta.malformed
            return delta
        if not isinstance(delta, CallEnd):
            return None
        self._drops = False
        return ContentDelta(delta.malformed) if delta.malformed else None

    def _named(self, delta: OutputDelta) -> OutputDelta:
        if not isinstance(delta, CallStart):
            return delta
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if delta.id:
            return delta
        digest = sha256(f"{self._name}:{number}".encode()).hexdigest()[:32]
        return CallStart(delta.name, self._parsing.new_id(digest))
