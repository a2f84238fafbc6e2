"""POST /v1/completions: text or token ids in, text out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from headwater.server.answers import CompletionAnswer, CompletionChoice, UsageAnswer
from headwater.server.body import read_body, request_name, traceparent
from headwater.server.continuation import FAILED, comment_of, continued, mark_line
from headwater.server.errors import RequestRefused
from headwater.server.generation import Delta, Generation, GenerationJob
from headwater.server.handoff import check_role, handed_off
from headwater.server.jobs import job_of
from headwater.server.logprobs import completion_logprobs, num_characters
from headwater.server.params import num_logprobs
from headwater.server.reply import JsonReply, Reply
from headwater.server.schema import CompletionRequest
from headwater.server.service import Service
from headwater.server.streaming import EventStream, stream, while_connected
from headwater.server.transcript import Transcript, transcribe
from headwater.server.unsupported import check_supported
from headwater.types import Tokens

_DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> Reply:
    """The endpoint."""
    service: Service = request.app.state.service
    body = await read_body(
        request, CompletionRequest, max_bytes=service.config.limits.max_body_bytes
    )
    name = request_name(request, body)
    check_supported(body)
    service.check_model(body.model)
    check_role(service)
    job = handed_off(request, service, await _job(service, body, name))
    job = continued(request, body, job, service.engine.info)
    job = replace(job, traceparent=traceparent(request))
    answer = _Completion(service, body, name, job)
    if body.stream:
        return answer.stream
    whole = await while_connected(request.receive, answer.whole())
    return JsonReply(whole, headers={"x-request-id": name})


async def _job(service: Service, body: CompletionRequest, name: str) -> GenerationJob:
    return job_of(
        service,
        body,
        name,
        await _prompt_tokens(service, body),
        max_tokens=body.max_tokens,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=num_logprobs(body.logprobs, service.config.limits, param="logprobs"),
    )


async def _prompt_tokens(service: Service, body: CompletionRequest) -> list[Tokens]:
    prompts = _prompts(body)
    if len(prompts) > service.config.limits.max_prompts:
        raise RequestRefused(
            f"at most {service.config.limits.max_prompts} prompts, got {len(prompts)}",
            param="prompt",
        )
    add_special_tokens = body.add_special_tokens is not False
    max_tokens = service.engine.info.max_model_len

    def encode() -> list[Tokens]:
        return [
            service.tokenizer.encode(
                prompt, add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
            if isinstance(prompt, str)
            else np.array(prompt, dtype=np.int32)
            for prompt in prompts
        ]

    return await service.in_thread(encode, size=sum(len(prompt) for prompt in prompts))


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts one by one: a flat list of ids is one prompt, a list of lists several."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    ids = [entry for entry in prompt if isinstance(entry, int)]
    texts = [entry for entry in prompt if isinstance(entry, str)]
    lists = [entry for entry in prompt if isinstance(entry, list)]
    if max(len(ids), len(texts), len(lists)) != len(prompt):
        raise RequestRefused(
            "a prompt is text, token ids, or a list of one of them", param="prompt"
        )
    if ids and not all(0 <= token < 1 << 31 for token in ids):
        raise RequestRefused("a token id is not negative and below 2^31", param="prompt")
    if not prompt:
        raise RequestRefused("the prompt is empty", param="prompt")
    return [ids] if ids else [*texts, *lists]


class _Completion:
    """One answer, sent whole or as it grows."""

    def __init__(
        self, service: Service, body: CompletionRequest, name: str, job: GenerationJob
    ) -> None:
        self._service = service
        self._body = body
        self._name = name
        self._job = job
        self._generation = Generation(service, job)
        self._created = service.created_now()
        self._offsets = [
            self._num_characters(job.said_of(index).tokens)
            for index in range(job.num_sequences)
        ]

    async def whole(self) -> CompletionAnswer:
        """Generate, then answer."""
        transcripts = await transcribe(self._generation, self._job.num_sequences)
        choices = [self._choice(index, entry) for index, entry in enumerate(transcripts)]
        return self._answer(choices, self._generation.usage())

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
            answer = self._answer([self._chunk(delta)], usage)
            await events.write(answer, comment=comment_of(delta, job, self._service))

        async def work() -> None:
            await self._generation.run(land)
            if options and options.include_usage:
                await events.write(self._answer([], self._generation.usage()))

        await stream(events, receive, work)

    def _answer(
        self, choices: list[CompletionChoice], usage: UsageAnswer | None
    ) -> CompletionAnswer:
        return CompletionAnswer(
            id=f"cmpl-{self._name}",
            created=self._created,
            model=self._service.model_name,
            choices=choices,
            usage=usage,
        )

    def _choice(self, index: int, entry: Transcript) -> CompletionChoice:
        choice = CompletionChoice(
            index=index,
            text=entry.text,
            finish_reason=entry.finish_reason,
            stop_reason=entry.stop_reason,
        )
        self._add_extras(choice, entry, is_first=True)
        return choice

    def _chunk(self, delta: Delta) -> CompletionChoice:
        choice = CompletionChoice(
            index=delta.index,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        self._add_extras(choice, delta, is_first=delta.is_first)
        return choice

    def _add_extras(
        self, choice: CompletionChoice, part: Delta | Transcript, *, is_first: bool
    ) -> None:
        index = choice.index
        if self._body.logprobs is not None:
            choice.logprobs = completion_logprobs(
                part.tokens, part.logprobs, self._service.tokenizer, offset=self._offsets[index]
            )
            self._offsets[index] += self._num_characters(part.tokens)
        if self._body.return_token_ids:
            prompt = self._job.prompt_of(index)
            choice.token_ids = part.tokens
            choice.prompt_token_ids = prompt.tokens.tolist() if is_first else UNSET

    def _num_characters(self, tokens: Sequence[int]) -> int:
        tokenizer = self._service.tokenizer
        return sum(num_characters(tokenizer.token_bytes(token)) for token in tokens)
