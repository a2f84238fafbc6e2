"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's format for conversations."""

import json
from collections.abc import Sequence
from typing import TypeVar

from msgspec import Struct
from starlette.requests import Request

from headwater.errors import HeadwaterError
from headwater.server.answers import UsageAnswer
from headwater.server.body import ASGIResponse, JsonResponse, body_size, read_body
from headwater.server.chat import chat_job, conversation_of
from headwater.server.conversation import prepare
from headwater.server.endpoint import Call, accept, respond
from headwater.server.errors import error_answer, error_response, status_of
from headwater.server.generation import Delta, GenerationJob, Transcript
from headwater.server.messages_request import chat_request
from headwater.server.messages_schema import (
    AnswerBlock,
    BlockDelta,
    BlockDeltaEvent,
    BlockKind,
    BlockStart,
    BlockStop,
    CountTokensAnswer,
    CountTokensRequest,
    MessageDeltaEvent,
    MessageEnd,
    MessagesAnswer,
    MessagesError,
    MessagesErrorObject,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessagesUsage,
)
from headwater.server.parsing.base import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    OutputDelta,
    ParsedAnswer,
    ReasoningDelta,
)
from headwater.server.schema import ChatRequest
from headwater.server.service import Service
from headwater.server.streaming import EventStyle

M = TypeVar("M", bound=CountTokensRequest)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _messages_error(error: HeadwaterError) -> MessagesError:
    """An error in Anthropic's format."""
    kind = _TYPES.get(status_of(error), "invalid_request_error")
    message = error_answer(error).error.message
    return MessagesError(error=MessagesErrorObject(type=kind, message=message))


MESSAGES_EVENTS = EventStyle(is_named=True, last=b"", error=_messages_error)


async def messages(request: Request) -> ASGIResponse:
    """Answer POST /v1/messages."""
    try:
        body = await _read(request, MessagesRequest)
        call = await accept(request, await _chat(request, body))
        # Clients send the model's limit as max_tokens, whatever the length of the prompt: use
        # what fits.
        job = await chat_job(call, max_tokens=None, default_max_tokens=body.max_tokens)
        return await respond(call, job, _MessagesFormat(call, job))
    except HeadwaterError as error:
        return error_response(error, _messages_error(error))


async def count_tokens(request: Request) -> ASGIResponse:
    """Tokens of a prompt, without generating."""
    try:
        service: Service = request.app.state.service
        chat = await _chat(request, await _read(request, CountTokensRequest))
        service.check_model(chat.model)
        prompt = await prepare(
            service, lambda: conversation_of(chat), num_bytes=body_size(request)
        )
        return JsonResponse(CountTokensAnswer(input_tokens=len(prompt.tokens)))
    except HeadwaterError as error:
        return error_response(error, _messages_error(error))


async def _read(request: Request, kind: type[M]) -> M:
    service: Service = request.app.state.service
    return await read_body(request, kind, max_bytes=service.config.limits.max_body_bytes)


async def _chat(request: Request, body: CountTokensRequest) -> ChatRequest:
    service: Service = request.app.state.service
    return await service.convert(lambda: chat_request(body), size=body_size(request))


class _MessagesFormat:
    """Writes output as messages: blocks of reasoning, text and tool use, in order."""

    style = MESSAGES_EVENTS
    reports_usage = True

    def __init__(self, call: Call[ChatRequest], job: GenerationJob) -> None:
        self._service = call.service
        self._job = job
        self._id = f"msg_{call.request_id}"
        self._num_blocks = 0
        self._open: BlockKind | None = None
        """Type of the block that is being written."""
        self._has_calls = False
        """Whether a call is complete."""

    def whole(self, transcripts: Sequence[Transcript], usage: UsageAnswer) -> Struct:
        entry = transcripts[0]
        end = _end(entry.finish_reason, entry.stop_reason, has_calls=bool(entry.parsed.calls))
        answer = MessagesAnswer(
            id=self._id,
            model=self._service.model_name,
            content=_blocks(entry.parsed),
            usage=self._usage(usage),
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
        )
        if entry.num_malformed:
            answer.malformed_tool_calls = entry.num_malformed
        return answer

    def events(self, delta: Delta, usage: UsageAnswer | None) -> list[Struct]:
        found: list[Struct] = []
        if delta.is_first and usage is not None:
            found.append(self._start(usage))
        for part in delta.parsed.deltas:
            found += self._part(part)
        if delta.finish_reason is not None and usage is not None:
            end = _end(delta.finish_reason, delta.stop_reason, has_calls=self._has_calls)
            if delta.num_malformed:
                end.malformed_tool_calls = delta.num_malformed
            found += self._close()
            found.append(MessageDeltaEvent(delta=end, usage=self._usage(usage)))
            found.append(MessageStop())
        return found

    def usage_event(self, usage: UsageAnswer) -> Struct:
        raise AssertionError("the last events of a message have the usage")

    def _start(self, usage: UsageAnswer) -> MessageStart:
        return MessageStart(
            message=MessagesAnswer(
                id=self._id,
                model=self._service.model_name,
                content=[],
                usage=self._usage(usage),
                stop_reason=None,
            )
        )

    def _part(self, part: OutputDelta) -> list[Struct]:
        """The events of one part of a delta."""
        match part:
            case ContentDelta():
                return self._grow("text", BlockDelta(type="text_delta", text=part.text))
            case ReasoningDelta():
                delta = BlockDelta(type="thinking_delta", thinking=part.text)
                return self._grow("thinking", delta)
            case CallStart():
                return [*self._close(), self._begin("tool_use", _tool_use(part))]
            case ArgumentsDelta():
                delta = BlockDelta(type="input_json_delta", partial_json=part.text)
                return self._grow("tool_use", delta)
            case CallEnd():
                self._has_calls |= not part.malformed
                return self._close()

    def _grow(self, kind: BlockKind, delta: BlockDelta) -> list[Struct]:
        """Add to the open block of this kind, or open one."""
        found: list[Struct] = []
        if self._open != kind:
            block = _text_block("") if kind == "text" else _thinking_block("")
            found = [*self._close(), self._begin(kind, block)]
        return [*found, BlockDeltaEvent(index=self._num_blocks, delta=delta)]

    def _begin(self, kind: BlockKind, block: AnswerBlock) -> BlockStart:
        self._open = kind
        return BlockStart(index=self._num_blocks, content_block=block)

    def _close(self) -> list[Struct]:
        """End the open block."""
        if self._open is None:
            return []
        self._open = None
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        return [BlockStop(index=index)]

    def _usage(self, usage: UsageAnswer) -> MessagesUsage:
        block_tokens = self._service.engine.info.block_tokens
        found = usage.prompt_tokens_details.cached_tokens
        # Only full blocks are cached; the rest of the prompt is computed again.
        created = max(usage.prompt_tokens // block_tokens * block_tokens - found, 0)
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - found - created,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=found,
            cache_creation_input_tokens=created,
        )


def _text_block(text: str) -> AnswerBlock:
    return AnswerBlock(type="text", text=text)


def _thinking_block(text: str) -> AnswerBlock:
    return AnswerBlock(type="thinking", thinking=text, signature="")


def _tool_use(start: CallStart) -> AnswerBlock:
    return AnswerBlock(type="tool_use", id=start.id, name=start.name, input={})


def _blocks(parsed: ParsedAnswer) -> list[AnswerBlock]:
    blocks: list[AnswerBlock] = []
    if parsed.reasoning:
        blocks.append(_thinking_block(parsed.reasoning))
    if parsed.content:
        blocks.append(_text_block(parsed.content))
    blocks += [
        AnswerBlock(
            type="tool_use", id=call.id, name=call.name, input=json.loads(call.arguments)
        )
        for call in parsed.calls
    ]
    return blocks


def _end(reason: str | None, stop: int | str | None, *, has_calls: bool) -> MessageEnd:
    if reason == "length":
        return MessageEnd(stop_reason="max_tokens")
    if isinstance(stop, str):
        return MessageEnd(stop_reason="stop_sequence", stop_sequence=stop)
    return MessageEnd(stop_reason="tool_use" if has_calls else "end_turn")
