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
    UsageAnswer,
)
from headwater.server.body import ASGIResponse
from headwater.server.chat_messages import num_characters, plain_messages
from headwater.server.endpoint import Call, begin, make_job, respond
from headwater.server.errors import RequestRefused
from headwater.server.generation import Delta, GenerationJob, Transcript
from headwater.server.logprobs import chat_logprobs
from headwater.server.params import num_logprobs
from headwater.server.schema import ChatRequest
from headwater.server.service import Service
from headwater.types import Tokens


async def chat_completions(request: Request) -> ASGIResponse:
    """The endpoint."""
    call = await begin(request, ChatRequest)
    body, service = call.body, call.service
    job = make_job(
        call,
        [await _prompt_tokens(service, body)],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        default_max_tokens=None,
        logprobs=_num_logprobs(body, service),
    )
    return await respond(call, job, _ChatFormat(call, job))


def _num_logprobs(body: ChatRequest, service: Service) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestRefused("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return num_logprobs(body.top_logprobs or 0, service.config.limits, param="top_logprobs")


async def _prompt_tokens(service: Service, body: ChatRequest) -> Tokens:
    messages = plain_messages(body.messages)

    def encode() -> Tokens:
        return service.tokenizer.encode_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            settings=body.chat_template_kwargs,
            max_tokens=service.engine.info.max_model_len,
        )

    return await service.in_thread(encode, size=num_characters(messages))


class _ChatFormat:
    """Writes output as chat completions."""

    def __init__(self, call: Call[ChatRequest], job: GenerationJob) -> None:
        self._service = call.service
        self._body = call.body
        self._id = f"chatcmpl-{call.request_id}"
        self._job = job
        self._created = call.service.created_now()

    def whole(self, transcripts: Sequence[Transcript], usage: UsageAnswer) -> Struct:
        return ChatAnswer(
            id=self._id,
            created=self._created,
            model=self._service.model_name,
            choices=[self._choice(index, entry) for index, entry in enumerate(transcripts)],
            usage=usage,
            prompt_token_ids=self._prompt_ids(),
        )

    def events(self, delta: Delta, usage: UsageAnswer | None) -> list[Struct]:
        first: list[Struct] = [self._role_chunk(delta.index)] if delta.is_first else []
        return [*first, self._chunk([self._delta(delta)], usage)]

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
            created=self._created,
            model=self._service.model_name,
            choices=choices,
            usage=usage,
        )

    def _choice(self, index: int, entry: Transcript) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=ChatMessage(content=entry.text),
            logprobs=self._logprobs(entry),
            finish_reason=entry.finish_reason,
            stop_reason=entry.stop_reason,
            token_ids=entry.tokens if self._body.return_token_ids else UNSET,
        )

    def _delta(self, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.tokens if self._body.return_token_ids else UNSET,
        )

    def _logprobs(self, part: Delta | Transcript) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(part.tokens, part.logprobs, self._service.tokenizer)

    def _prompt_ids(self) -> list[int] | UnsetType:
        return self._job.prompts[0].tokens.tolist() if self._body.return_token_ids else UNSET
