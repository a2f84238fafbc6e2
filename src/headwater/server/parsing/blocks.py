"""A parser for formats that write each call as a block: between two markers, or as one object."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from headwater.server.parsing.base import ParsedOutput, ToolCall
from headwater.server.parsing.call_stream import CallStream, ObjectScanner, OpenCall
from headwater.server.parsing.scanner import MarkerScanner

_SEPARATORS = re.compile(r"[\s,;]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMarkers:
    """The markers that a format writes around its calls."""

    opening: str
    closing: str = ""
    """Empty if a block ends with its first JSON object. More objects may follow, each after a
    comma or a semicolon."""

    wrapping: tuple[str, ...] = ()
    """Markers around a group of blocks; they carry no information."""

    opens_at_brace: bool = False
    """Whether an answer that begins with `{` is a block."""


class _Block:
    """The open block: its text, and the call that is emitted while it grows."""

    def __init__(self, opening: str, stream: CallStream) -> None:
        self.opening = opening
        self.pieces: list[str] = []
        self.call = OpenCall(stream)
        self.object = ObjectScanner()


class BlockParser:
    """Emits content and the arguments of calls as soon as they are certain.

    White space around calls is dropped; the content of an answer without calls is unchanged.
    """

    def __init__(
        self,
        markers: BlockMarkers,
        read: Callable[[str], ToolCall | None],
        stream: Callable[[], CallStream],
    ) -> None:
        """`read` parses the text of a complete block, `stream` the text of a growing one."""
        self._markers = markers
        self._read = read
        self._stream = stream
        every = (markers.opening, markers.closing, *markers.wrapping)
        self._scanner = MarkerScanner([marker for marker in every if marker])
        self._block: _Block | None = None
        self._is_after_object = False
        """Whether an object that follows is another call."""
        self._space = ""
        """White space that is content only if more content follows."""
        self._has_begun = False
        self._has_calls = False
        self._num_malformed = 0

    @property
    def num_malformed(self) -> int:
        return self._num_malformed

    @property
    def is_reasoning(self) -> bool:
        return False

    def feed(self, text: str) -> ParsedOutput:
        out = ParsedOutput()
        for piece, is_marker in self._scanner.feed(text):
            if is_marker:
                self._take_marker(piece, out)
            else:
                self._take_text(piece, out)
        return out

    def end(self) -> ParsedOutput:
        out = ParsedOutput()
        self._take_text(self._scanner.end(), out)
        if self._block is not None:
            self._close("", out, is_whole=False)
        if not self._has_calls:
            out.add_content(self._space)
        return out

    def _take_marker(self, marker: str, out: ParsedOutput) -> None:
        markers = self._markers
        self._has_begun, self._is_after_object = True, False
        if self._block is None:
            if marker == markers.opening:
                self._open(marker)
            elif marker == markers.closing:
                self._add_content(marker, out)
        elif marker == markers.closing:
            self._close(marker, out, is_whole=True)
        elif marker == markers.opening and not markers.closing:
            self._close("", out, is_whole=False)
            self._open(marker)
        else:
            self._grow(marker, out)

    def _take_text(self, text: str, out: ParsedOutput) -> None:
        if not self._has_begun and text.strip():
            self._has_begun = True
            if self._markers.opens_at_brace and text.lstrip().startswith("{"):
                self._open("")
        while text:
            if self._is_after_object:
                text = self._after_object(text)
            elif self._block is not None:
                text = self._grow(text, out)
            else:
                self._add_content(text, out)
                return

    def _after_object(self, text: str) -> str:
        """Skip separators between calls; returns the rest."""
        separators = _SEPARATORS.match(text)
        assert separators is not None, "the pattern matches an empty text, too"
        rest = text[separators.end() :]
        if rest:
            self._is_after_object = False
            if rest[0] == "{":
                self._open("")
        return rest.removeprefix("]")

    def _open(self, opening: str) -> None:
        self._block = _Block(opening, self._stream())

    def _grow(self, text: str, out: ParsedOutput) -> str:
        """Add to the open block; returns what comes after it."""
        block = self._block
        assert block is not None, "only an open block grows"
        end = None if self._markers.closing else block.object.feed(text)
        taken = text[:end]
        block.pieces.append(taken)
        block.call.feed(taken, out)
        if end is None:
            return ""
        self._is_after_object = self._close("", out, is_whole=True)
        return text[end:]

    def _close(self, closing: str, out: ParsedOutput, *, is_whole: bool) -> bool:
        """End the open block; returns whether it is a call."""
        block, self._block = self._block, None
        assert block is not None, "only an open block is closed"
        text = "".join(block.pieces)
        call = self._read(text) if is_whole else None
        content = self._space + block.opening + text + closing
        is_call = block.call.end(call, content, out)
        self._space = ""
        self._has_calls |= is_call
        self._num_malformed += not is_call
        return is_call

    def _add_content(self, text: str, out: ParsedOutput) -> None:
        kept = text.rstrip()
        if kept:
            out.add_content(self._space + kept)
            self._space = ""
        self._space += text[len(kept) :]
