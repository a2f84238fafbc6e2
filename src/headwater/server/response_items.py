"""The output items of a response, complete and as they grow in a stream."""

from copy import copy
from typing import Any

from headwater.server.parsing.base import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    OutputDelta,
    ParsedAnswer,
    ParsedOutput,
    ReasoningDelta,
    ToolCall,
)
from headwater.server.responses_schema import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)


def items_of(response_id: str, parsed: ParsedAnswer) -> list[OutputItem]:
    """The items of a whole answer, with the ids that its stream has."""
    made: list[OutputItem] = []
    if parsed.reasoning:
        text = ReasoningText(text=parsed.reasoning)
        made.append(ReasoningItem(id=_item_id("rs", response_id, len(made)), content=[text]))
    if parsed.content or not (parsed.reasoning or parsed.calls):
        content = [OutputText(text=parsed.content)]
        made.append(MessageItem(id=_item_id("msg", response_id, len(made)), content=content))
    for call in parsed.calls:
        made.append(_call_item(_item_id("fc", response_id, len(made)), call))
    return made


class ItemWriter:
    """Writes the events of a stream, and numbers them."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self._number = 0
        self.items: list[OutputItem] = []
        """Items that have ended."""
        self._open: OutputItem | None = None
        self._pieces: list[str] = []

    def event(self, kind: str, **fields: Any) -> ResponseEvent:  # noqa: ANN401 -- typed by the event
        """An event with the next number."""
        number, self._number = self._number, self._number + 1
        return ResponseEvent(type=kind, sequence_number=number, **fields)

    def skip_numbers(self, count: int) -> None:
        """Skip `count` numbers, so that no number is used twice when a stream is continued
        here."""
        self._number += max(count, 0)

    def write(self, parsed: ParsedOutput) -> list[ResponseEvent]:
        """The events of what a delta added."""
        return [event for delta in parsed.deltas for event in self._part(delta)]

    def close(self) -> list[ResponseEvent]:
        """End the open item."""
        item, text = self._open, "".join(self._pieces)
        at = self._place()
        self._open, self._pieces = None, []
        match item:
            case None:
                return []
            case FunctionCallItem():
                item.arguments = text
                kind = "response.function_call_arguments.done"
                found = [self.event(kind, arguments=text, name=item.name, **at)]
            case ReasoningItem():
                item.content = [ReasoningText(text=text)]
                found = [self.event("response.reasoning_text.done", text=text, **at)]
            case MessageItem():
                item.content, item.status = [OutputText(text=text)], "completed"
                found = [self.event("response.output_text.done", text=text, logprobs=[], **at)]
        if not isinstance(item, FunctionCallItem):
            found.append(self.event("response.content_part.done", part=item.content[0], **at))
        index = len(self.items)
        self.items.append(item)
        done = self.event("response.output_item.done", output_index=index, item=item)
        return [*found, done]

    def _part(self, delta: OutputDelta) -> list[ResponseEvent]:
        match delta:
            case ContentDelta():
                found = self._open_text(MessageItem)
                return [*found, self._grow("response.output_text.delta", delta.text)]
            case ReasoningDelta():
                found = self._open_text(ReasoningItem)
                return [*found, self._grow("response.reasoning_text.delta", delta.text)]
            case CallStart():
                return [*self.close(), self._begin_call(delta)]
            case ArgumentsDelta():
                return [self._grow("response.function_call_arguments.delta", delta.text)]
            case CallEnd():
                return self._end_call(delta)

    def _place(self) -> dict[str, Any]:
        """The fields that say which item an event is about."""
        if self._open is None:
            return {}
        at = {"output_index": len(self.items), "item_id": self._open.id}
        return at if isinstance(self._open, FunctionCallItem) else {**at, "content_index": 0}

    def _grow(self, kind: str, text: str) -> ResponseEvent:
        self._pieces.append(text)
        more: dict[str, Any] = {"logprobs": []} if isinstance(self._open, MessageItem) else {}
        return self.event(kind, delta=text, **more, **self._place())

    def _open_text(self, kind: type[MessageItem] | type[ReasoningItem]) -> list[ResponseEvent]:
        """Open an item of this kind, unless it is open."""
        if isinstance(self._open, kind):
            return []
        found = self.close()
        index, stem = len(self.items), self._response_id
        part: OutputText | ReasoningText = OutputText(text="")
        if kind is ReasoningItem:
            self._open = ReasoningItem(id=_item_id("rs", stem, index), content=[])
            part = ReasoningText(text="")
        else:
            self._open = MessageItem(
                id=_item_id("msg", stem, index), content=[], status="in_progress"
            )
        added = self._added(self._open)
        return [
            *found,
            added,
            self.event("response.content_part.added", part=part, **self._place()),
        ]

    def _begin_call(self, start: CallStart) -> ResponseEvent:
        self._open = FunctionCallItem(
            id=_item_id("fc", self._response_id, len(self.items)),
            call_id=start.id,
            name=start.name,
            arguments="",
            status="in_progress",
        )
        return self._added(self._open)

    def _end_call(self, end: CallEnd) -> list[ResponseEvent]:
        assert isinstance(self._open, FunctionCallItem), "a call ends after it began"
        self._open.status = "incomplete" if end.malformed else "completed"
        return self.close()

    def _added(self, item: OutputItem) -> ResponseEvent:
        # A copy: the item itself is completed later, perhaps before this event is encoded.
        index = len(self.items)
        return self.event("response.output_item.added", output_index=index, item=copy(item))


def _call_item(item_id: str, call: ToolCall) -> FunctionCallItem:
    return FunctionCallItem(
        id=item_id, call_id=call.id, name=call.name, arguments=call.arguments
    )


def _item_id(kind: str, response_id: str, index: int) -> str:
    return f"{kind}_{response_id.removeprefix('resp_')}_{index}"
