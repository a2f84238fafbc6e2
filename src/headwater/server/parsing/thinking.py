"""Reasoning between two tags, before the answer itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.server.parsing.base import OutputParser, ParsedOutput
from headwater.server.parsing.scanner import MarkerScanner


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """The tags that a family of models writes around its reasoning."""

    opening: str
    closing: str

    @property
    def markers(self) -> Sequence[str]:
        return (self.opening, self.closing)

    def is_open(self, prompt_end: str) -> bool:
        """Whether a prompt with this end has already begun the reasoning."""
        return prompt_end.rstrip().endswith(self.opening)


class PlainParser:
    """All text is content."""

    num_malformed = 0
    is_reasoning = False

    def feed(self, text: str) -> ParsedOutput:
        out = ParsedOutput()
        out.add_content(text)
        return out

    def end(self) -> ParsedOutput:
        return ParsedOutput()


class ThinkingParser:
    """Splits off the reasoning; the inner parser reads the rest.

    Only tags at the beginning count: later tags are part of the answer. White space at both
    ends of the reasoning, and before the answer, is dropped.
    """

    def __init__(self, tags: ReasoningTags, inner: OutputParser, *, is_open: bool) -> None:
        """`is_open` means that the prompt ends inside the reasoning."""
        self._tags = tags
        self._inner = inner
        self._scanner = MarkerScanner(tags.markers)
        self._is_answer = False
        """Whether the reasoning has ended, or there was none. Then tags do not count any
        more."""
        self._is_open = is_open
        self._space = ""
        """White space before the answer, or at the end of the reasoning so far."""
        self._has_reasoning = False
        self._drops_space = False

    @property
    def num_malformed(self) -> int:
        return self._inner.num_malformed

    @property
    def is_reasoning(self) -> bool:
        return self._is_open and not self._is_answer

    def feed(self, text: str) -> ParsedOutput:
        out = ParsedOutput()
        if self._is_answer:
            self._pass_on(text, out)
            return out
        for piece in self._scanner.feed(text):
            self._take(*piece, out)
        self._give_held(out)
        return out

    def end(self) -> ParsedOutput:
        out = ParsedOutput()
        self._take(self._scanner.end(), False, out)
        if not self._is_answer and not self._is_open:
            self._pass_on(self._space, out)
        out.add(self._inner.end())
        return out

    def _give_held(self, out: ParsedOutput) -> None:
        """Pass on the text that the scanner holds when the answer begins. After that, the parser
        does not use the scanner."""
        if self._is_answer:
            self._pass_on(self._scanner.end(), out)

    def _take(self, text: str, is_tag: bool, out: ParsedOutput) -> None:
        if self._is_answer:
            self._pass_on(text, out)
        elif is_tag:
            self._take_tag(text, out)
        else:
            self._take_text(text, out)

    def _take_tag(self, tag: str, out: ParsedOutput) -> None:
        if self._is_open and tag == self._tags.closing:
            self._space, self._is_open, self._drops_space = "", False, True
            self._is_answer = True
        elif not self._is_open and tag == self._tags.opening and not self._has_reasoning:
            self._space, self._is_open = "", True
        else:
            self._take_text(tag, out)

    def _take_text(self, text: str, out: ParsedOutput) -> None:
        if self._is_open:
            kept = (text if self._has_reasoning else text.lstrip()).rstrip()
            if kept:
                out.add_reasoning(self._space + kept)
                self._space, self._has_reasoning = "", True
            if self._has_reasoning:
                self._space += text[len(text.rstrip()) :]
        elif text.strip():
            self._is_answer = True
            self._pass_on(self._space + text, out)
        else:
            self._space += text

    def _pass_on(self, text: str, out: ParsedOutput) -> None:
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        if text:
            out.add(self._inner.feed(text))
