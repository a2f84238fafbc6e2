"""Turns token ids into text as they arrive, without incomplete characters and without stop
strings.

    tokens    [ 0xE2 ]  [ 0x82 ]  [ 0xAC ]  [ "a" ]
    emitted      ""        ""        "€"       "a"

Text is held back while it may still change (an incomplete character) or may be the beginning
of a stop string. Held text is emitted at the end of the sequence, or removed by the stop string.
"""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

from headwater.engine.tokenizer import Tokenizer
from headwater.scheduler.request import SequenceOutput

_REPLACEMENT = "\ufffd"

_MAX_UNFINISHED = 3
"""A character has at most four bytes, so at most three bytes can be incomplete."""

_CONTEXT_TOKENS = 12
"""Number of earlier tokens kept with the new ones. Decoders look back for spaces and for
incomplete characters; three incomplete characters have at most nine bytes, so at most nine
tokens."""

_MAX_WINDOW_TOKENS = 32
"""The window is cut back to its context above this size, so that a token costs O(1)."""


class Detokenizer:
    """The text of one sequence, in pieces. The joined pieces are the text of all tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """`prompt` are the tokens before the output: the last ones decide whether the output
        begins with a space."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._bytes = tokenizer.byte_tokens
        self._held: list[int] = []
        """Byte tokens that do not form a complete character yet. They are not in the window."""
        self._window: list[int] = []
        self._num_emitted = 0
        for token in self._context(prompt):
            self._take(token)
        text = self._text()
        # Characters of the window's text that were emitted already or belong to the prompt.
        self._num_emitted = len(text) - _num_unfinished(text)

    def copy(self) -> "Detokenizer":
        """A copy in the same state."""
        other = copy(self)
        other._held, other._window = self._held.copy(), self._window.copy()
        return other

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is final after these tokens."""
        broken = "".join([self._take(token) for token in tokens])
        text = self._text()
        piece = self._emit(text, len(text) - _num_unfinished(text))
        if len(self._window) > _MAX_WINDOW_TOKENS:
            num_held = len(text) - self._num_emitted
            self._window = self._context(self._window)
            self._num_emitted = max(0, len(self._text()) - num_held)
        return broken + piece

    def flush(self) -> str:
        """The text that is held back, including an incomplete character: no more tokens will
        come."""
        broken = self._break() if self._held else ""
        text = self._text()
        return broken + self._emit(text, len(text))

    def _take(self, token: int) -> str:
        """Add `token` to the window, or hold it. Returns all text up to a broken character."""
        byte = self._bytes.get(token)
        shown = ""
        if self._held and (byte is None or _state(self._raw() + bytes([byte])) is None):
            shown = self._break()
        if byte is None:
            self._window.append(token)
            return shown
        self._held.append(token)
        whole = _state(self._raw())
        if whole is None:
            return shown + self._break()
        if whole:
            self._window += self._held
            self._held = []
        return shown

    def _break(self) -> str:
        """The held bytes can never form a character: return all text so far, with a replacement
        sign. The new window begins with the letter "a": without it, a decoder would take the
        next bytes for a part of the broken run."""
        text = self._text()
        shown = self._emit(text, len(text)) + _REPLACEMENT
        self._held = []
        self._window = [token for token, byte in self._bytes.items() if byte == ord("a")]
        self._num_emitted = len(self._text())
        return shown

    def _raw(self) -> bytes:
        return bytes(self._bytes[token] for token in self._held)

    def _context(self, tokens: Sequence[int]) -> list[int]:
        """The last few of `tokens`, from the beginning of a character on."""
        start = max(0, len(tokens) - _CONTEXT_TOKENS)
        while start < len(tokens) and self._bytes.get(tokens[start], 0) & 0xC0 == 0x80:
            start += 1
        return [int(token) for token in tokens[start:]]

    def _text(self) -> str:
        return self._tokenizer.decode(
            self._window, skip_special_tokens=self._skip_special_tokens
        )

    def _emit(self, text: str, end: int) -> str:
        piece = text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        return piece


class StopFilter:
    """Passes text on until a stop string appears in it, however the text is divided into
    pieces."""

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
        """The text that was held because a stop string might have followed."""
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
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for count in range(longest, 0, -1):
            tail = self._held[-count:]
            if any(stop.startswith(tail) for stop in self._stops):
                return count
        return 0


def _state(raw: bytes) -> bool | None:
    """Whether these bytes are complete characters; None if more bytes cannot make them
    complete."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return False if error.reason == "unexpected end of data" else None
    return True


def _num_unfinished(text: str) -> int:
    """Characters at the end that more tokens may still complete."""
    count = 0
    while count < _MAX_UNFINISHED and text.endswith(_REPLACEMENT, 0, len(text) - count):
        count += 1
    return count


class TextDelta(NamedTuple):
    """The text that one output added."""

    text: str
    finish_reason: str | None
    """Set once. After a stop string the sequence may still run in the engine."""

    stop_reason: int | str | None
    """The stop string or stop token that ended the text, if any."""

    num_tokens: int
    """Tokens of the output up to the one that completed a stop string; all without one."""


class TextStream:
    """Detokenises one sequence and looks for its stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """`shown_ids` are special tokens that are part of the text although other special
        tokens are not."""
        self.num_tokens = 0
        self._hidden: frozenset[int] = frozenset()
        if skip_special_tokens and shown_ids:
            self._hidden = frozenset(tokenizer.special_ids.values()) - shown_ids
            skip_special_tokens = False
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._text = Detokenizer(
            tokenizer, prompt=prompt, skip_special_tokens=skip_special_tokens
        )
        self._stop = StopFilter(stops, include_stop=include_stop)
        self._has_stops = bool(stops)

    def append_output(self, output: SequenceOutput) -> TextDelta:
        """Return the text that can no longer change after this output. An output of several
        steps gives the same text and tokens as one output for each step."""
        early = max(self._min_tokens - 1 - self.num_tokens, 0)
        head, tail = output.tokens[:early], output.tokens[early:]
        if not head or not tail:
            return self._append_steps(output.tokens, output)
        text = self._append(head, None).text  # stop strings are not looked for here
        rest = self._append_steps(tail, output)
        return rest._replace(text=text + rest.text, num_tokens=early + rest.num_tokens)

    def _append_steps(self, tokens: list[int], output: SequenceOutput) -> TextDelta:
        """Append the tokens of one or several steps; `output` tells how the last one ended."""
        if len(tokens) < 2 or not self._has_stops:
            return self._append(tokens, output)
        before = self.num_tokens, self._text.copy(), copy(self._stop)
        delta = self._append(tokens, output)
        if not isinstance(delta.stop_reason, str):
            return delta
        # One of these tokens completed a stop string: find it, step by step.
        self.num_tokens, self._text, self._stop = before
        text = ""
        for count, token in enumerate(tokens, 1):
            step = self._append([token], output if count == len(tokens) else None)
            text += step.text
            if step.finish_reason is not None:
                break
        return step._replace(text=text, num_tokens=count)

    def _append(self, tokens: list[int], output: SequenceOutput | None) -> TextDelta:
        """Append tokens at once. `output` is None if more tokens of the same output follow."""
        self.num_tokens += len(tokens)
        finish_reason = None if output is None else output.finish_reason
        stop_token = None if output is None else output.stop_token
        shown = tokens
        if stop_token is not None and not self._include_stop:
            shown = shown[:-1]  # a stop token is not part of the text
        if self._hidden:
            shown = [token for token in shown if token not in self._hidden]
        text, stop = self._show(self._text.push(shown))
        if stop is None and finish_reason is not None:
            rest, stop = self._show(self._text.flush())
            text += rest if stop is not None else rest + self._stop.flush()
        if stop is not None:
            return TextDelta(text, "stop", stop, len(tokens))
        return TextDelta(text, finish_reason, stop_token, len(tokens))

    def _show(self, text: str) -> tuple[str, str | None]:
        if self.num_tokens < self._min_tokens:
            return text, None
        return self._stop.push(text)
