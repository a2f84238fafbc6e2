"""POST /v1/chat/completions: a conversation in, the next message out."""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from headwater.server.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    ChatToolCallDelta,
    FunctionCall,
    FunctionCallDelta,
    PromptLogprobs,
    UsageAnswer,
)
from headwater.server.body import ASGIResponse, body_size
from headwater.server.chat_prompt import plain_messages, template_settings, tool_use
from headwater.server.conversation import Conversation, prepare
from headwater.server.endpoint import Call, begin, make_job, respond
from headwater.server.errors import RequestRefused
from headwater.server.generation import Delta, GenerationJob, Transcript
from headwater.server.logprobs import chat_logprobs, prompt_logprobs
from headwater.server.params import constraint_param, num_logprobs, structured_output
from headwater.server.parsing.base import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    ParsedOutput,
    ReasoningDelta,
    ToolCall,
)
from headwater.server.schema import ChatRequest
from headwater.server.service import Service
from headwater.server.streaming import OPENAI_EVENTS

_NOTHING = ChatDelta()


async def chat_completions(request: Request) -> ASGIResponse:
    """Answer POST /v1/chat/completions."""
    call = await begin(request, ChatRequest)
    body = call.body
    max_tokens = body.max_completion_tokens or body.max_tokens
    job = await chat_job(call, max_tokens=max_tokens, default_max_tokens=None)
    return await respond(call, job, _ChatFormat(call, job))


async def chat_job(
    call: Call[ChatRequest], *, max_tokens: int | None, default_max_tokens: int | None
) -> GenerationJob:
    """The generation job of a conversation, for any API."""
    body, service = call.body, call.service
    prompt = await prepare(
        service, lambda: conversation_of(body), num_bytes=body_size(call.request)
    )
    return make_job(
        call,
        [prompt.tokens],
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        logprobs=_num_logprobs(body, service),
        grammar=prompt.grammar,
        parsing=prompt.parsing,
    )


def _num_logprobs(body: ChatRequest, service: Service) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestRefused(
                "top_logprobs needs logprobs: true; send both or neither", param="top_logprobs"
            )
        return None
    return num_logprobs(body.top_logprobs or 0, service.config.limits, param="top_logprobs")


def conversation_of(body: ChatRequest) -> Conversation:
    """The conversation of a chat request."""
    return Conversation(
        messages=plain_messages(body.messages),
        tools=tool_use(body),
        structured=structured_output(body),
        structured_param=constraint_param(body),
        settings=template_settings(body),
        add_generation_prompt=body.add_generation_prompt is not False,
    )


class _ChatFormat:
    """Writes output as chat completions."""

    style = OPENAI_EVENTS
    reports_usage = False

    def __init__(self, call: Call[ChatRequest], job: GenerationJob) -> None:
        self._service = call.service
        self._body = call.body
        self._id = f"chatcmpl-{call.request_id}"
        self._job = job
        self._shows_reasoning = call.body.include_reasoning is not False
        self._deltas = [_MessageDeltas(call.body) for _ in range(job.num_sequences)]

    def whole(self, transcripts: Sequence[Transcript], usage: UsageAnswer) -> Struct:
        return ChatAnswer(
            id=self._id,
            created=self._job.created,
            model=self._service.model_name,
            choices=[self._choice(index, entry) for index, entry in enumerate(transcripts)],
            usage=usage,
            prompt_token_ids=self._prompt_ids(),
            prompt_logprobs=self._prompt_logprobs(transcripts[0]),
        )

    def events(self, delta: Delta, usage: UsageAnswer | None) -> list[Struct]:
        first: list[Struct] = [self._role_chunk(delta.index)] if delta.is_first else []
        fields = self._deltas[delta.index].write(delta.parsed)
        if self._shows_nothing(delta, fields):
            return first
        chunk = self._chunk([self._delta(delta, fields)], usage)
        chunk.prompt_logprobs = self._prompt_logprobs(delta)
        return [*first, chunk]

    def _shows_nothing(self, delta: Delta, fields: ChatDelta) -> bool:
        """Whether the parser holds back all text of this delta, and the client requested
        nothing else that the delta has."""
        body = self._body
        if delta.finish_reason or body.logprobs or body.return_token_ids:
            return False
        if delta.prompt_logprobs is not None:
            return False
        return fields == _NOTHING and self._job.parsing.make is not None

    def usage_event(self, usage: UsageAnswer) -> Struct:
        return self._chunk([], usage)

    def _role_chunk(self, index: int) -> ChatChunk:
        """The first chunk of a choice: it names the role and has no text."""
        delta = ChatDelta(role="assistant", content="")
        chunk = self._chunk([ChatChunkChoice(index=index, delta=delta)], None)
        chunk.prompt_token_ids = self._prompt_ids()
        return chunk

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageAnswer | None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._job.created,
            model=self._service.model_name,
            choices=choices,
            usage=usage,
        )

    def _choice(self, index: int, entry: Transcript) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=self._message(entry),
            logprobs=self._logprobs(entry),
            finish_reason=_finish_reason(entry.finish_reason, bool(entry.parsed.calls)),
            stop_reason=entry.stop_reason,
            token_ids=entry.tokens if self._body.return_token_ids else UNSET,
        )

    def _delta(self, delta: Delta, fields: ChatDelta) -> ChatChunkChoice:
        if fields.content is None and not self._job.parsing.make:
            fields.content = ""
        if delta.finish_reason is not None:
            fields.malformed_tool_calls = delta.num_malformed
        has_calls = self._deltas[delta.index].has_calls
        return ChatChunkChoice(
            index=delta.index,
            delta=fields,
            logprobs=self._logprobs(delta),
            finish_reason=_finish_reason(delta.finish_reason, has_calls),
            stop_reason=delta.stop_reason,
            token_ids=delta.tokens if self._body.return_token_ids else UNSET,
        )

    def _message(self, entry: Transcript) -> ChatMessage:
        parsed = entry.parsed
        message = ChatMessage(content=parsed.content)
        if parsed.calls:
            message.tool_calls = [
                ChatToolCall(id=call.id, function=_function(call)) for call in parsed.calls
            ]
            message.content = parsed.content or None
        if parsed.reasoning and self._shows_reasoning:
            message.reasoning_content = message.reasoning = parsed.reasoning
        if entry.num_malformed:
            message.malformed_tool_calls = entry.num_malformed
        return message

    def _logprobs(self, part: Delta | Transcript) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(part.tokens, part.logprobs, self._service.tokenizer)

    def _prompt_logprobs(self, part: Delta | Transcript) -> PromptLogprobs | UnsetType:
        if part.prompt_logprobs is None:
            return UNSET
        tokens = self._job.prompts[0].tokens.tolist()
        return prompt_logprobs(tokens, part.prompt_logprobs, self._service.tokenizer)

    def _prompt_ids(self) -> list[int] | UnsetType:
        return self._job.prompts[0].tokens.tolist() if self._body.return_token_ids else UNSET


class _MessageDeltas:
    """Writes the parsed output of one choice as deltas of its message."""

    def __init__(self, body: ChatRequest) -> None:
        self._shows_reasoning = body.include_reasoning is not False
        self._num_calls = 0
        self.has_calls = False
        """Whether a call is complete."""

    def write(self, parsed: ParsedOutput) -> ChatDelta:
        """What `parsed` adds to the message."""
        fields = ChatDelta()
        for delta in parsed.deltas:
            match delta:
                case ContentDelta():
                    fields.content = (fields.content or "") + delta.text
                case ReasoningDelta() if self._shows_reasoning:
                    fields.reasoning = (fields.reasoning or "") + delta.text
                    fields.reasoning_content = fields.reasoning
                case CallStart():
                    self._begin_call(delta, fields)
                case ArgumentsDelta():
                    self._open_call(fields).function.arguments += delta.text
                case CallEnd():
                    self.has_calls |= not delta.malformed
        return fields

    def _begin_call(self, start: CallStart, fields: ChatDelta) -> None:
        self._num_calls += 1
        call = self._open_call(fields)
        call.id, call.type, call.function.name = start.id, "function", start.name

    def _open_call(self, fields: ChatDelta) -> ChatToolCallDelta:
        """The delta of the last call; a chunk has one for each of its calls."""
        index = self._num_calls - 1
        calls = fields.tool_calls = fields.tool_calls or []
        if not calls or calls[-1].index != index:
            calls.append(ChatToolCallDelta(index=index, function=FunctionCallDelta()))
        return calls[-1]


def _finish_reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if reason == "stop" and has_calls else reason


def _function(call: ToolCall) -> FunctionCall:
    return FunctionCall(name=call.name, arguments=call.arguments)
