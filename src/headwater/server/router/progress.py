"""How far one client's answer got: what it was sent, and what that stands for.

Outlives attempts. While every event that the client has was marked with its tokens, another
instance can go on after the last one; otherwise a stream that broke can only be ended.
"""

from typing import Any

import msgspec

from headwater.server.continuation import FIELD, take_mark

_DONE = b"data: [DONE]\n\n"
_END = b"\n\n"


class InstanceFailed(Exception):
    """The instance said, in the stream, that it cannot go on."""


class Progress:
    """Of one streamed answer."""

    def __init__(self) -> None:
        self.has_begun = False
        """The client has the status line, and perhaps events."""
        self.is_whole = False
        """Nothing but the end of the stream is missing."""
        self._tokens: list[int] = []
        self._seed: int | None = None
        self._is_unmarked = False

    @property
    def can_continue(self) -> bool:
        """Whether another instance could go on where this stream is."""
        return not self._is_unmarked and self._seed is not None

    def strip(self, events: bytes) -> bytes:
        """Whole events as the client is to get them; what they stand for is remembered.

        Raises InstanceFailed where they end in an error of the instance's own, and ValueError
        for marks that cannot be read; what came before it is dropped, and told again by whoever
        goes on.
        """
        marked = [take_mark(event + _END) for event in events.split(_END)[:-1]]
        if any(mark is not None and mark.has_failed for mark, _ in marked):
            raise InstanceFailed
        for mark, event in marked:
            if mark is not None:
                self._tokens += mark.tokens
                self._seed = mark.seed
                self.is_whole = mark.has_ended
            elif event != _DONE and not self.is_whole and not _is_opening(event):
                self._is_unmarked = True
        return b"".join(event for _, event in marked)

    def body(self, raw: bytes) -> bytes:
        """The request as the next instance is to get it: to go on after what was said."""
        if self._seed is None:
            return raw
        body: dict[str, Any] = msgspec.json.decode(raw)
        body[FIELD] = [*(body.get(FIELD) or []), *self._tokens]
        body["seed"] = self._seed
        return msgspec.json.encode(body)


def _is_opening(event: bytes) -> bool:
    """The first chunk of a chat says who speaks, and stands for no token."""
    return b'"role":"assistant"' in event
