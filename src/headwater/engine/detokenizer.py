"""Token ids to text as they arrive: never half a character, never part of a stop string.

    tokens    [ 0xE2 ]  [ 0x82 ]  [ 0xAC ]  [ "a" ]
    emitted      ""        ""        "€"       "a"

Text is held back while it may still change (an unfinished character) or may still turn out
to be the beginning of a stop string. What is held is emitted at the end, or cut by the stop.
"""

from collections.abc import Sequence

from headwater.engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"

_MAX_UNFINISHED = 3
"""A character is at most four bytes, so at most three of it can be waiting for more."""

_CONTEXT_TOKENS = 12
"""Tokens kept before the new ones: decoders look back for spaces and split characters, and
three unfinished characters are at most nine bytes, so at most nine tokens."""

_MAX_WINDOW_TOKENS = 32
"""The window is cut back to its context beyond this, so that a token costs O(1)."""


class Detokenizer:
    """Text of one sequence, piece by piece; the pieces joined are the text of the whole."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """`prompt` is what the text continues: its end decides on a leading space."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = [int(token) for token in prompt[-_CONTEXT_TOKENS:]]
        text = self._text()
        # Characters of the window's text that were emitted, or belong to the prompt.
        self._num_emitted = len(text) - _num_unfinished(text)

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens made certain."""
        self._window.extend(tokens)
        text = self._text()
        piece = self._emit(text, len(text) - _num_unfinished(text))
        if len(self._window) > _MAX_WINDOW_TOKENS:
            num_held = len(text) - self._num_emitted
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._num_emitted = max(0, len(self._text()) - num_held)
        return piece

    def flush(self) -> str:
        """What is held back, though it is no whole character: nothing more will come."""
        text = self._text()
        return self._emit(text, len(text))

    def _text(self) -> str:
        return self._tokenizer.decode(
            self._window, skip_special_tokens=self._skip_special_tokens
        )

    def _emit(self, text: str, end: int) -> str:
        piece = text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        return piece


class StopFilter:
    """Passes text on until a stop string appears in it, wherever pieces happen to end."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string if the text ended at one."""
        if not self._stops:
            return piece, None
        self._held += piece
        found = self._find()
        if found is not None:
            place, stop = found
            shown = self._held[: place + len(stop) if self._include_stop else place]
            self._held = ""
            return shown, stop
        end = len(self._held) - self._num_begun()
        shown, self._held = self._held[:end], self._held[end:]
        return shown, None

    def flush(self) -> str:
        """Text that was held in case a stop string followed; none did."""
        shown, self._held = self._held, ""
        return shown

    def _find(self) -> tuple[int, str] | None:
        """The stop string that *ends* first: what a check after each character would find."""
        places = [(self._held.find(stop), stop) for stop in self._stops]
        hits = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if not hits:
            return None
        _, place, stop = min(hits)
        return place, stop

    def _num_begun(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for count in range(longest, 0, -1):
            tail = self._held[-count:]
            if any(stop.startswith(tail) for stop in self._stops):
                return count
        return 0


def _num_unfinished(text: str) -> int:
    """Characters at the end that more tokens may still turn into a real one."""
    count = 0
    while count < _MAX_UNFINISHED and text.endswith(_REPLACEMENT, 0, len(text) - count):
        count += 1
    return count
