"""A parser for formats that write each call between two markers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.server.parsing.base import ParsedOutput, ToolCall
from headwater.server.parsing.scanner import MarkerScanner


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMarkers:
    """The markers that a format writes around its calls."""

    opening: str
    closing: str = ""
    """Empty if a block ends with the next block or with the answer."""

    wrapping: tuple[str, ...] = ()
    """Markers around a group of blocks; they carry no information."""

    opens_at_brace: bool = False
    """Whether an answer that begins with `{` is a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBlock:
    """The content of a block."""

    calls: list[ToolCall]
    rest: str = ""
    """Text after the calls, which is content."""


BlockReader = Callable[[str], ReadBlock | None]
"""Reads the text of a block; None if it is not a call."""


class BlockParser:
    """Emits content as it comes, and a call when its block is complete.

    White space around calls is dropped; the content of an answer without calls is unchanged.
    """

    def __init__(self, markers: BlockMarkers, read: BlockReader) -> None:
        self._markers = markers
        self._read = read
        every = (markers.opening, markers.closing, *markers.wrapping)
        self._scanner = MarkerScanner([marker for marker in every if marker])
        self._block: list[str] | None = None
        """Pieces of the open block, starting with its opening marker; None outside a block."""
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
            is_whole = not self._markers.closing
            self._close("", out, is_whole=is_whole)
        if not self._has_calls:
            out.content += self._space
        return out

    def _take_marker(self, marker: str, out: ParsedOutput) -> None:
        markers = self._markers
        self._has_begun = True
        if self._block is None:
            if marker == markers.opening:
                self._block = [marker]
            elif marker == markers.closing:
                self._add_content(marker, out)
            return
        if marker == markers.closing:
            self._close(marker, out, is_whole=True)
        elif marker == markers.opening and not markers.closing:
            self._close("", out, is_whole=True)
            self._block = [marker]
        else:
            self._block.append(marker)

    def _take_text(self, text: str, out: ParsedOutput) -> None:
        if not self._has_begun and text.strip():
            self._has_begun = True
            if self._markers.opens_at_brace and text.lstrip().startswith("{"):
                self._block = [""]
        if self._block is not None:
            self._block.append(text)
        else:
            self._add_content(text, out)

    def _close(self, closing: str, out: ParsedOutput, *, is_whole: bool) -> None:
        assert self._block is not None, "only an open block is closed"
        opening, *pieces = self._block
        self._block = None
        text = "".join(pieces)
        found = self._read(text) if is_whole else None
        if found is None:
            self._num_malformed += 1
            self._add_content(opening + text + closing, out)
            return
        self._space = ""
        self._has_calls = True
        out.calls += found.calls
        self._add_content(found.rest, out)

    def _add_content(self, text: str, out: ParsedOutput) -> None:
        kept = text.rstrip()
        if kept:
            out.content += self._space + kept
            self._space = ""
        self._space += text[len(kept) :]


def one_call(call: ToolCall | None) -> ReadBlock | None:
    """A block with one call, or None."""
    return None if call is None else ReadBlock(calls=[call])


def several_calls(calls: Sequence[ToolCall | None], rest: str = "") -> ReadBlock | None:
    """A block with several calls. If one of them cannot be parsed, the block is malformed."""
    known = [call for call in calls if call is not None]
    if not known or len(known) < len(calls):
        return None
    return ReadBlock(calls=known, rest=rest)
