"""Emits a tool call while the model still writes it: its name, then pieces of its arguments.

A call begins once its name is one of the request's tools and its arguments have begun. The output
after a text depends on that text alone, never on how it was split. So an instance that continues a
stream emits exactly the rest.
"""

import re
from collections.abc import Container, Sequence
from typing import Protocol

from headwater.server.parsing.base import (
    CallEnd,
    CallStart,
    ParsedOutput,
    ToolCall,
    read_json,
)

MAX_HEAD_CHARS = 1024
"""If the arguments have not begun within this length, the call is emitted when it is complete.
The bound keeps the search for their beginning cheap."""

_SIGNS = re.compile(r'["\\{}]')


class CallStream(Protocol):
    """Reads the text of one call as it grows. Used by one parser."""

    start: CallStart | None
    """Set once the call has begun."""

    def feed(self, text: str) -> str:
        """The JSON text of arguments that is certain after `text`."""

    def end(self) -> str:
        """The JSON text that ends the arguments, if the format does not write it."""


class ObjectScanner:
    """Finds where the first JSON object of a text ends, however the text is split."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """The index after the end of the object; None if it does not end in `text`."""
        at = 0
        if self._is_escaped and text:
            self._is_escaped, at = False, 1
        while (sign := _SIGNS.search(text, at)) is not None:
            at = sign.end()
            if self._in_string:
                if sign.group() == "\\":
                    self._is_escaped = at == len(text)
                    at += 1
                elif sign.group() == '"':
                    self._in_string = False
            elif self._is_end(sign.group()):
                return at
        return None

    def _is_end(self, sign: str) -> bool:
        """Whether `sign`, outside of strings, closes the object."""
        if sign == "{":
            self._depth += 1
        elif sign == '"':
            self._in_string = self._depth > 0
        elif sign == "}" and self._depth:
            self._depth -= 1
            return not self._depth
        return False


class JsonCallStream:
    """Arguments that the model writes as a JSON object: their text is passed on unchanged."""

    def __init__(
        self, heads: Sequence[re.Pattern[str]], names: Container[str], *, name: str = ""
    ) -> None:
        """Each of `heads` matches a text up to the object's brace; its groups are `name`, unless
        that is known already, and perhaps `id`."""
        self.start: CallStart | None = None
        self._heads = heads
        self._names = names
        self._name = name
        self._head = ""
        self._object = ObjectScanner()
        self._is_whole = False

    def feed(self, text: str) -> str:
        if self.start is None:
            text = self._find_start(text)
        if self.start is None or self._is_whole:
            return ""
        end = self._object.feed(text)
        self._is_whole = end is not None
        return text[:end]

    def end(self) -> str:
        return ""

    def _find_start(self, text: str) -> str:
        """Look for the head; returns the text from the arguments on."""
        if len(self._head) >= MAX_HEAD_CHARS:
            return ""
        self._head += text
        tried = (head.match(self._head, 0, MAX_HEAD_CHARS) for head in self._heads)
        match = next((found for found in tried if found is not None), None)
        if match is None:
            return ""
        found = match.groupdict()
        name = self._name or found["name"]
        if name not in self._names:
            return ""
        self.start = CallStart(name, found.get("id") or "")
        return self._head[match.end() - 1 :]


class OpenCall:
    """A call whose text is still growing, and the part of it that was emitted."""

    def __init__(self, stream: CallStream) -> None:
        self._stream = stream
        self._arguments: list[str] = []

    def feed(self, text: str, out: ParsedOutput) -> None:
        """Emit what is certain after `text`."""
        had_begun = self._stream.start is not None
        piece = self._stream.feed(text)
        if self._stream.start is not None and not had_begun:
            out.deltas.append(self._stream.start)
        self._emit(piece, out)

    def end(self, call: ToolCall | None, text: str, out: ParsedOutput) -> bool:
        """End the call. `call` is the result of parsing its complete text, `text` the content if
        it is malformed. Returns whether it is a call."""
        start = self._stream.start
        if start is None:
            if call is None:
                out.add_content(text)
            else:
                out.add_call(call)
            return call is not None
        self._emit(self._stream.end(), out)
        is_call = call is not None and call.name == start.name and self._was_emitted(call)
        out.deltas.append(CallEnd("" if is_call else text))
        return is_call

    def _emit(self, piece: str, out: ParsedOutput) -> None:
        if piece:
            self._arguments.append(piece)
            out.add_arguments(piece)

    def _was_emitted(self, call: ToolCall) -> bool:
        """Whether the emitted arguments are those of `call`."""
        try:
            emitted = read_json("".join(self._arguments))
        except ValueError:
            return False
        return bool(read_json(call.arguments) == emitted)
