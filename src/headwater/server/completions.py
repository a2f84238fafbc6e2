"""POST /v1/completions: text or token ids in, text out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import UNSET, Struct
from starlette.requests import Request

from headwater.errors import RequestError
from headwater.server.answers import CompletionAnswer, CompletionChoice, UsageAnswer
from headwater.server.body import ASGIResponse, body_size
from headwater.server.endpoint import Call, begin, make_job, respond
from headwater.server.errors import RequestRefused
from headwater.server.generation import Delta, GenerationJob, Transcript
from headwater.server.logprobs import (
    completion_logprobs,
    num_characters,
    prompt_logprobs,
    with_prompt,
)
from headwater.server.params import constraint_param, num_logprobs, structured_output
from headwater.server.schema import CompletionRequest
from headwater.server.service import Service
from headwater.server.streaming import OPENAI_EVENTS
from headwater.types import Tokens

_DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> ASGIResponse:
    """Answer POST /v1/completions."""
    call = await begin(request, CompletionRequest)
    body, service = call.body, call.service
    job = make_job(
        call,
        await _prompt_tokens(service, body),
        max_tokens=_max_tokens(body),
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        grammar=await _grammar(call),
        prompt_logprobs=_num_prompt_logprobs(body, service),
        logprobs=num_logprobs(body.logprobs, service.config.limits, param="logprobs"),
    )
    return await respond(call, job, _CompletionFormat(call, job))


def _max_tokens(body: CompletionRequest) -> int | None:
    """The token limit for the engine. With `echo`, 0 returns the prompt alone: the engine
    samples one token, which the answer leaves out."""
    if body.max_tokens == 0 and not body.echo:
        raise RequestRefused(
            "max_tokens is 0, so nothing would be generated; send at least 1, or echo: true",
            param="max_tokens",
        )
    return 1 if body.max_tokens == 0 else body.max_tokens


def _num_prompt_logprobs(body: CompletionRequest, service: Service) -> int | None:
    """Number of alternatives for each prompt token. With `echo`, `logprobs` also applies to the
    prompt."""
    wanted = body.prompt_logprobs
    if wanted is None and body.echo:
        wanted = body.logprobs
    return num_logprobs(wanted, service.config.limits, param="prompt_logprobs")


async def _grammar(call: Call[CompletionRequest]) -> str:
    """The grammar of the output; empty without a constraint."""
    wanted = structured_output(call.body)
    if wanted is None:
        return ""
    param = constraint_param(call.body)
    service, size = call.service, body_size(call.request)
    try:
        grammar = await service.convert(wanted.to_grammar, size=size)
    except RequestError as exc:
        raise RequestRefused(str(exc), param=param) from exc
    await service.check_grammar(grammar, param=param)
    return grammar


async def _prompt_tokens(service: Service, body: CompletionRequest) -> list[Tokens]:
    prompts = _prompts(body)
    if len(prompts) > service.config.limits.max_prompts:
        raise RequestRefused(
            f"the request has {len(prompts)} prompts; the limit is "
            f"{service.config.limits.max_prompts}. Send several requests",
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
            "prompt must be text, token ids, a list of texts or a list of token id lists",
            param="prompt",
        )
    if ids and not all(0 <= token < 1 << 31 for token in ids):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise RequestRefused(
            f"a token id must be at least 0 and below 2^31, got {wrong}", param="prompt"
        )
    if not prompt:
        raise RequestRefused("the prompt is empty; send at least one token", param="prompt")
    return [ids] if ids else [*texts, *lists]


class _CompletionFormat:
    """Writes output as text completions."""

    style = OPENAI_EVENTS
    reports_usage = False

    def __init__(self, call: Call[CompletionRequest], job: GenerationJob) -> None:
        self._service = call.service
        self._body = call.body
        self._id = f"cmpl-{call.request_id}"
        self._job = job
        self._has_echo = bool(call.body.echo)
        self._has_only_echo = self._has_echo and call.body.max_tokens == 0
        self._offsets = [
            self._num_characters(job.prompt_of(index).tokens.tolist()) if self._has_echo else 0
            for index in range(job.num_sequences)
        ]

    def whole(self, transcripts: Sequence[Transcript], usage: UsageAnswer) -> Struct:
        if self._has_only_echo:
            transcripts = [
                Transcript(finish_reason="length", prompt_logprobs=entry.prompt_logprobs)
                for entry in transcripts
            ]
        choices = [self._choice(index, entry) for index, entry in enumerate(transcripts)]
        return self._answer(choices, usage)

    def events(self, delta: Delta, usage: UsageAnswer | None) -> list[Struct]:
        if self._has_only_echo:
            reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
            delta = replace(delta, text="", tokens=[], logprobs=[], finish_reason=reason)
            delta.stop_reason = None
        return [self._answer([self._chunk(delta)], usage)]

    def usage_event(self, usage: UsageAnswer) -> Struct:
        return self._answer([], usage)

    def _answer(
        self, choices: list[CompletionChoice], usage: UsageAnswer | None
    ) -> CompletionAnswer:
        if usage is not None and self._has_only_echo:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return CompletionAnswer(
            id=self._id,
            created=self._job.created,
            model=self._service.model_name,
            choices=choices,
            usage=usage,
        )

    def _choice(self, index: int, entry: Transcript) -> CompletionChoice:
        choice = CompletionChoice(
            index=index,
            text=self._echo(index) + entry.text,
            finish_reason=entry.finish_reason,
            stop_reason=entry.stop_reason,
        )
        self._add_extras(choice, entry, is_first=True)
        return choice

    def _chunk(self, delta: Delta) -> CompletionChoice:
        choice = CompletionChoice(
            index=delta.index,
            text=(self._echo(delta.index) if delta.is_first else "") + delta.text,
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
        self._add_prompt_logprobs(choice, part)
        if self._body.return_token_ids:
            prompt = self._job.prompt_of(index)
            choice.token_ids = part.tokens
            choice.prompt_token_ids = prompt.tokens.tolist() if is_first else UNSET

    def _add_prompt_logprobs(self, choice: CompletionChoice, part: Delta | Transcript) -> None:
        """Add the log-probabilities of the prompt to those of the first token."""
        if part.prompt_logprobs is None:
            return
        tokens = self._job.prompt_of(choice.index).tokens.tolist()
        tokenizer, entries = self._service.tokenizer, part.prompt_logprobs
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(tokens, entries, tokenizer)
        if self._has_echo and choice.logprobs is not None:
            choice.logprobs = with_prompt(tokens, entries, choice.logprobs, tokenizer)

    def _echo(self, index: int) -> str:
        """The text of the prompt, if the client wants it in the answer."""
        if not self._has_echo:
            return ""
        tokens = self._job.prompt_of(index).tokens.tolist()
        return self._service.tokenizer.decode(tokens, skip_special_tokens=False)

    def _num_characters(self, tokens: Sequence[int]) -> int:
        tokenizer = self._service.tokenizer
        return sum(num_characters(tokenizer.token_bytes(token)) for token in tokens)
