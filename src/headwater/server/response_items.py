"""The output items of a response, complete and as they grow in a stream."""

from typing import Any

from headwater.server.parsing.base import ParsedOutput, ToolCall
from headwater.server.responses_schema import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)


def items_of(response_id: str, parsed: ParsedOutput) -> list[OutputItem]:
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
        self._num_items = 0
        self._open: MessageItem | ReasoningItem | None = None
        self._pieces: list[str] = []

    def event(self, kind: str, **fields: Any) -> ResponseEvent:  # noqa: ANN401 -- typed by the event
        """The next event."""
        number, self._number = self._number, self._number + 1
        return ResponseEvent(type=kind, sequence_number=number, **fields)

    def write(self, parsed: ParsedOutput) -> list[ResponseEvent]:
        """The events of what a delta added."""
        found: list[ResponseEvent] = []
        if parsed.reasoning:
            found += self._grow(parsed.reasoning, is_reasoning=True)
        if parsed.content:
            found += self._grow(parsed.content, is_reasoning=False)
        for call in parsed.calls:
            found += [*self.close(), *self._call(call)]
        return found

    def close(self) -> list[ResponseEvent]:
        """End the open item."""
        item = self._open
        if item is None:
            return []
        text = "".join(self._pieces)
        self._open, self._pieces = None, []
        at = {"output_index": self._num_items, "content_index": 0, "item_id": item.id}
        index, self._num_items = self._num_items, self._num_items + 1
        if isinstance(item, ReasoningItem):
            item.content = [ReasoningText(text=text)]
            found = [self.event("response.reasoning_text.done", text=text, **at)]
        else:
            item.content = [OutputText(text=text)]
            item.status = "completed"
            found = [
                self.event("response.output_text.done", text=text, logprobs=[], **at),
            ]
        return [
            *found,
            self.event("response.content_part.done", part=item.content[0], **at),
            self.event("response.output_item.done", output_index=index, item=item),
        ]

    def _grow(self, text: str, *, is_reasoning: bool) -> list[ResponseEvent]:
        found: list[ResponseEvent] = []
        if isinstance(self._open, ReasoningItem) is not is_reasoning or self._open is None:
            found = [*self.close(), *self._begin(is_reasoning=is_reasoning)]
        assert self._open is not None, "just opened"
        self._pieces.append(text)
        at = {"output_index": self._num_items, "content_index": 0, "item_id": self._open.id}
        if is_reasoning:
            return [*found, self.event("response.reasoning_text.delta", delta=text, **at)]
        delta = self.event("response.output_text.delta", delta=text, logprobs=[], **at)
        return [*found, delta]

    def _begin(self, *, is_reasoning: bool) -> list[ResponseEvent]:
        index, stem = self._num_items, self._response_id
        part: OutputText | ReasoningText = OutputText(text="")
        if is_reasoning:
            self._open = ReasoningItem(id=_item_id("rs", stem, index), content=[])
            part = ReasoningText(text="")
        else:
            self._open = MessageItem(
                id=_item_id("msg", stem, index), content=[], status="in_progress"
            )
        at = {"output_index": index, "content_index": 0, "item_id": self._open.id}
        return [
            self.event(
                "response.output_item.added", output_index=index, item=_copy(self._open)
            ),
            self.event("response.content_part.added", part=part, **at),
        ]

    def _call(self, call: ToolCall) -> list[ResponseEvent]:
        index, self._num_items = self._num_items, self._num_items + 1
        item = _call_item(_item_id("fc", self._response_id, index), call)
        empty = FunctionCallItem(
            id=item.id, call_id=call.id, name=call.name, arguments="", status="in_progress"
        )
        at = {"output_index": index, "item_id": item.id}
        return [
            self.event("response.output_item.added", output_index=index, item=empty),
            self.event("response.function_call_arguments.delta", delta=call.arguments, **at),
            self.event(
                "response.function_call_arguments.done",
                arguments=call.arguments,
                name=call.name,
                **at,
            ),
            self.event("response.output_item.done", output_index=index, item=item),
        ]


def _call_item(item_id: str, call: ToolCall) -> FunctionCallItem:
    return FunctionCallItem(
        id=item_id, call_id=call.id, name=call.name, arguments=call.arguments
    )


def _copy(item: MessageItem | ReasoningItem) -> MessageItem | ReasoningItem:
    """A copy of the current state, because the item itself changes after this event was
    sent."""
    if isinstance(item, MessageItem):
        return MessageItem(id=item.id, content=[], status=item.status)
    return ReasoningItem(id=item.id, content=[])


def _item_id(kind: str, response_id: str, index: int) -> str:
    return f"{kind}_{response_id.removeprefix('resp_')}_{index}"
