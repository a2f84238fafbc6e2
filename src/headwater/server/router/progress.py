"""How far one client's answer got: what it was sent, and what that stands for.

Outlives attempts. While every event that the client has was marked with its tokens, another
instance can go on after the last one; otherwise a stream that broke can only be ended.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from headwater.server.continuation import FIELD, ContinuationMark, take_mark
from headwater.server.schema import ResumedChoice

_DONE = b"data: [DONE]\n\n"
_END = b"\n\n"


class InstanceFailed(Exception):
    """The instance said, in the stream, that it cannot go on."""


class Returned(Exception):
    """The instance said, in the stream, that it has no room to go on now."""


@dataclass(slots=True)
class _Choice:
    """What the client has of one choice."""

    tokens: list[int] = field(default_factory=list)
    seed: int | None = None
    has_ended: bool = False

    def hear(self, mark: ContinuationMark) -> None:
        self.tokens += mark.tokens
        self.seed = mark.seed
        self.has_ended = mark.has_ended


class StreamProgress:
    """Of one streamed answer."""

    def __init__(self) -> None:
        self.has_begun = False
        """The client has the status line, and perhaps events."""
        self._choices: list[_Choice] = []
        """All there are, once an event was marked."""
        self._is_unmarked = False
        self._opening = b""
        """Says who speaks, and stands for no token: passed on with the first event that does, so
        that whoever begins anew does not say it twice."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing but the end of the stream is missing."""
        return bool(self._choices) and all(choice.has_ended for choice in self._choices)

    @property
    def can_continue(self) -> bool:
        """Whether another instance could go on where this stream is."""
        return bool(self._choices) and not self._is_unmarked

    @property
    def num_tokens(self) -> int:
        """Tokens that the client has."""
        return sum(len(choice.tokens) for choice in self._choices)

    def strip(self, events: bytes) -> bytes:
        """Whole events as the client is to get them; what they stand for is remembered.

        Raises InstanceFailed or Returned where they end in the instance's saying so, and
        ValueError for marks that cannot be read; what came before it is dropped, and told again
        by whoever goes on.
        """
        marked = [take_mark(event + _END) for event in events.split(_END)[:-1]]
        for mark, _ in marked:
            if mark is not None and mark.has_failed:
                raise Returned if mark.is_returned else InstanceFailed
        shown = []
        for mark, event in marked:
            if mark is None and _is_opening(event):
                self._opening += event
                continue
            if mark is not None:
                self._hear(mark)
            elif event != _DONE and not self.is_whole:
                self._is_unmarked = True
            shown += [self._opening, event]
            self._opening = b""
        return b"".join(shown)

    def body(self, raw: bytes) -> bytes:
        """The request as the next instance is to get it: to go on after what was said."""
        self._opening = b""
        if not self._choices:
            return raw
        body: dict[str, Any] = msgspec.json.decode(raw)
        before = body.get(FIELD) or [{}] * len(self._choices)
        body[FIELD] = [
            _joined(ResumedChoice(**told), choice)
            for told, choice in zip(before, self._choices, strict=True)
        ]
        return msgspec.json.encode(body)

    def _hear(self, mark: ContinuationMark) -> None:
        if not self._choices:
            self._choices = [_Choice() for _ in range(mark.num_choices)]
        if not 0 <= mark.index < len(self._choices):
            raise ValueError(f"there is no choice {mark.index}")
        self._choices[mark.index].hear(mark)


def _joined(told: ResumedChoice, choice: _Choice) -> ResumedChoice:
    """What the client itself told of a choice, and what it got since."""
    return ResumedChoice(
        token_ids=[*told.token_ids, *choice.tokens],
        seed=told.seed if choice.seed is None else choice.seed,
        has_ended=told.has_ended or choice.has_ended,
    )


def _is_opening(event: bytes) -> bool:
    """The first chunk of a chat says who speaks, and stands for no token."""
    return b'"role":"assistant"' in event
