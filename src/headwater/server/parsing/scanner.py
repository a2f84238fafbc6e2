"""Finds markers in a stream of text, however the stream is divided."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ScannedText(NamedTuple):
    """A piece of text, or one marker."""

    text: str
    is_marker: bool


class MarkerScanner:
    """Emits text as soon as it cannot be the beginning of a marker.

    No marker may be the beginning of another one; then the first match is the only one.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._pattern = re.compile("|".join(re.escape(marker) for marker in markers))
        self._firsts = {marker[0] for marker in markers}
        self._longest = max(len(marker) for marker in markers)
        self._held = ""
        """The end of the stream so far, which may be the beginning of a marker."""

    def feed(self, text: str) -> Iterator[ScannedText]:
        """The pieces that are final after `text`."""
        text = self._held + text
        start = 0
        for match in self._pattern.finditer(text):
            if match.start() > start:
                yield ScannedText(text[start : match.start()], False)
            yield ScannedText(match.group(), True)
            start = match.end()
        end = self._held_from(text, start)
        self._held = text[end:]
        if end > start:
            yield ScannedText(text[start:end], False)

    def end(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        return held

    def _held_from(self, text: str, start: int) -> int:
        """Start of the longest suffix that is the beginning of a marker."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts:
                suffix = text[at:]
                if any(marker.startswith(suffix) for marker in self._markers):
                    return at
        return len(text)
