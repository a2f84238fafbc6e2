"""Tracks which tokens of a stream the client has received, over all attempts.

While every event sent to the client had a continuation mark, another instance can continue after
the last one. Otherwise a broken stream can only be ended.
"""

from dataclasses import dataclass, field

import msgspec

from headwater.server.continuation import FIELD, ContinuationMark, take_mark
from headwater.server.schema import ResumedChoice
from headwater.server.streaming import DONE, OPENAI_EVENTS, EventStyle

_END = b"\n\n"
_MAX_EVENT_BYTES = 8 * 1024 * 1024


class EventSplitter:
    """Splits a byte stream into whole server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """All events that are complete now. Raises ValueError for an event without an end."""
        whole = self._rest + piece
        end = whole.rfind(_END)
        cut = 0 if end < 0 else end + len(_END)
        self._rest = whole[cut:]
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than the limit of {_MAX_EVENT_BYTES} bytes")
        return whole[:cut]


class InstanceFailed(Exception):
    """The instance reported in the stream that it failed."""


class InstanceFull(Exception):
    """The instance gave the request back: its KV cache is full."""


@dataclass(slots=True)
class _Choice:
    """The part of one choice that the client has received."""

    tokens: list[int] = field(default_factory=list)
    seed: int | None = None
    created: int | None = None
    has_ended: bool = False

    def add(self, mark: ContinuationMark) -> None:
        self.tokens += mark.tokens
        self.seed = mark.seed
        self.created = self.created if mark.created is None else mark.created
        self.has_ended = mark.has_ended


class _Resumed(msgspec.Struct, kw_only=True):
    """The only field of a request that is read here."""

    continue_choices: list[ResumedChoice] | None = None


class StreamProgress:
    """Progress of one streamed response."""

    def __init__(self, style: EventStyle = OPENAI_EVENTS) -> None:
        self.style = style
        self.has_begun = False
        """The client has received the status line, and maybe events."""
        self._choices: list[_Choice] = []
        """All choices, known from the first mark on."""
        self._is_unmarked = False
        self._parts = b""
        """Events without tokens, such as the role chunk of a chat. They are sent with the next
        event that has some, so that an instance that starts over does not send them twice."""

    @property
    def is_whole(self) -> bool:
        """Whether only the end of the stream is missing."""
        return bool(self._choices) and all(choice.has_ended for choice in self._choices)

    @property
    def has_ended(self) -> bool:
        """Whether a stream has ended although its format has no last event: all its choices
        have ended, or an error came that no other instance would avoid."""
        return not self.style.last and (self.is_whole or self._is_unmarked)

    @property
    def can_continue(self) -> bool:
        """Whether another instance can continue this stream."""
        return bool(self._choices) and not self._is_unmarked

    @property
    def num_tokens(self) -> int:
        """Tokens the client has received."""
        return sum(len(choice.tokens) for choice in self._choices)

    def strip(self, events: bytes) -> bytes:
        """Whole events without their marks, ready to send; the marks are recorded.

        Raises InstanceFailed or InstanceFull when a mark reports it, and ValueError for a
        malformed mark. Nothing of `events` is recorded then; the next instance generates it
        again.
        """
        marked = [take_mark(event + _END) for event in events.split(_END)[:-1]]
        for mark, _ in marked:
            if mark is not None and mark.has_failed:
                raise InstanceFull if mark.is_returned else InstanceFailed
        shown = []
        for mark, event in marked:
            if mark is not None and mark.is_part:
                self._parts += event
                continue
            if mark is not None:
                self._record(mark)
            elif event != DONE and not self.is_whole:
                self._is_unmarked = True
            shown += [self._parts, event if event.strip() else b""]
            self._parts = b""
        return b"".join(shown)

    def body(self, raw: bytes) -> bytes:
        """The request body for the next instance, with the output the client already has."""
        self._parts = b""
        if not self._choices:
            return raw
        before = [ResumedChoice() for _ in self._choices]
        if FIELD.encode() in raw:
            before = msgspec.json.decode(raw, type=_Resumed).continue_choices or before
        entries = [
            _joined(entry, choice) for entry, choice in zip(before, self._choices, strict=True)
        ]
        # Appended as text: a long body is not parsed again, and of two fields with one name a
        # parser takes the last.
        field = f',"{FIELD}":'.encode() + msgspec.json.encode(entries) + b"}"
        return raw.rstrip()[:-1] + (field if raw.strip() != b"{}" else field[1:])

    def _record(self, mark: ContinuationMark) -> None:
        if not self._choices:
            self._choices = [_Choice() for _ in range(mark.num_choices)]
        if not 0 <= mark.index < len(self._choices):
            raise ValueError(
                f"continuation mark of choice {mark.index}, but there are {len(self._choices)}"
            )
        self._choices[mark.index].add(mark)


def _joined(before: ResumedChoice, choice: _Choice) -> ResumedChoice:
    """The output in the client's own request, and what the client has received since."""
    return ResumedChoice(
        token_ids=[*before.token_ids, *choice.tokens],
        seed=before.seed if choice.seed is None else choice.seed,
        created=before.created if choice.created is None else choice.created,
        has_ended=before.has_ended or choice.has_ended,
    )
