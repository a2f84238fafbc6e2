"""POST /v1/chat/completions: a conversation in, the next turn out."""

from dataclasses import replace

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

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
from headwater.server.body import read_body, request_name, traceparent
from headwater.server.continuation import FAILED, comment_of, continued, mark_line
from headwater.server.errors import RequestRefused
from headwater.server.generation import Delta, Generation, GenerationJob
from headwater.server.handoff import check_role, handed_off
from headwater.server.jobs import job_of
from headwater.server.logprobs import chat_logprobs
from headwater.server.messages import num_characters, plain_messages
from headwater.server.params import num_logprobs
from headwater.server.reply import JsonReply, Reply
from headwater.server.schema import ChatRequest
from headwater.server.service import Service
from headwater.server.streaming import EventStream, stream, while_connected
from headwater.server.transcript import Transcript, transcribe
from headwater.server.unsupported import check_supported
from headwater.types import Tokens


async def chat_completions(request: Request) -> Reply:
    """The endpoint."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatRequest, max_bytes=service.config.limits.max_body_bytes)
    name = request_name(request, body)
    check_supported(body)
    service.check_model(body.model)
    check_role(service)
    job = handed_off(request, service, await _job(service, body, name))
    job = continued(request, body, job, service.engine.info)
    job = replace(job, traceparent=traceparent(request))
    answer = _Chat(service, body, name, job)
    if body.stream:
        return answer.stream
    whole = await while_connected(request.receive, answer.whole())
    return JsonReply(whole, headers={"x-request-id": name})


async def _job(service: Service, body: ChatRequest, name: str) -> GenerationJob:
    return job_of(
        service,
        body,
        name,
        [await _prompt_tokens(service, body)],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        default_max_tokens=None,
        logprobs=_num_logprobs(body, service),
    )


def _num_logprobs(body: ChatRequest, service: Service) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestRefused("top_logprobs needs logprobs to be true", param="top_logprobs")
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


class _Chat:
    """One reply, sent whole or as it grows."""

    def __init__(
        self, service: Service, body: ChatRequest, name: str, job: GenerationJob
    ) -> None:
        self._service = service
        self._body = body
        self._name = name
        self._job = job
        self._generation = Generation(service, job)
        self._created = service.created_now()

    async def whole(self) -> ChatAnswer:
        """Generate, then answer."""
        transcripts = await transcribe(self._generation, self._job.num_sequences)
        return ChatAnswer(
            id=f"chatcmpl-{self._name}",
            created=self._created,
            model=self._service.model_name,
            choices=[self._choice(index, entry) for index, entry in enumerate(transcripts)],
            usage=self._generation.usage(),
            prompt_token_ids=self._prompt_ids(),
        )

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate, and send each delta as it comes."""
        job = self._job
        events = EventStream(
            send,
            [(b"x-request-id", self._name.encode())],
            on_failure=mark_line(FAILED) if job.is_marked else b"",
        )
        options = self._body.stream_options
        has_running_usage = bool(options and options.continuous_usage_stats)

        async def land(delta: Delta) -> None:
            usage = self._generation.usage() if has_running_usage else None
            chunk = self._chunk([self._delta(delta)], usage)
            opening = [self._opening(delta.index)] if delta.is_first else []
            await events.write(*opening, chunk, comment=comment_of(delta, job, self._service))

        async def work() -> None:
            await self._generation.run(land)
            if options and options.include_usage:
                await events.write(self._chunk([], self._generation.usage()))

        await stream(events, receive, work)

    def _opening(self, index: int) -> ChatChunk:
        """The chunk that says who speaks."""
        delta = ChatDelta(role="assistant", content="")
        chunk = self._chunk([ChatChunkChoice(index=index, delta=delta)], None)
        chunk.prompt_token_ids = self._prompt_ids()
        return chunk

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageAnswer | None) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{self._name}",
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
