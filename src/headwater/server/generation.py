"""Runs one HTTP request on the engine and turns its tokens into deltas of text.

The endpoints differ only in how they write a delta.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

import numpy as np

from headwater.cache import Hint
from headwater.engine.detokenizer import TextStream
from headwater.engine.front import aborted_outputs
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import HeadwaterError, QueueFull
from headwater.metrics import names
from headwater.metrics.recorder import RequestTimer, SequenceProgress
from headwater.scheduler.request import (
    Request,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
    Usage,
    params_of_choice,
)
from headwater.server.answers import (
    CompletionTokensDetails,
    PromptTokensDetails,
    UsageAnswer,
    cache_details,
)
from headwater.server.errors import RequestRefused
from headwater.server.parsing.base import ParsedAnswer, ParsedOutput
from headwater.server.parsing.model_output import PLAIN_TEXT, AnswerParsing, AnswerReader
from headwater.server.service import Service
from headwater.types import LoadPolicy, RequestId, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPrompt:
    """One prompt and its sampling parameters."""

    tokens: Tokens
    params: SamplingParams

    def followed_by(self, resumed: Sequence[int]) -> Tokens:
        """The prompt and the output tokens that already exist."""
        if not resumed:
            return self.tokens
        return np.concatenate((self.tokens, np.array(resumed, dtype=np.int32)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedOutput:
    """Output of one choice that another instance generated before the stream moved here."""

    tokens: Sequence[int] = ()
    has_ended: bool = False
    """The choice is complete; nothing is generated for it."""


_NO_OUTPUT = ResumedOutput()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """Everything one HTTP request asks the engine to generate."""

    name: str
    """The request id that the client knows."""

    prompts: Sequence[GenerationPrompt]
    num_choices: int
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    parsing: AnswerParsing = PLAIN_TEXT
    """How reasoning and tool calls are read from the text."""

    priority: int = 0
    created: int = 0  # Unix time in the response; the same when another instance continues it
    cache_salt: str = ""
    session_id: str = ""
    cache_hint: Hint | None = None
    wants_cache_details: bool = False
    owner: str = ""
    """Name of the caller's key; empty without named keys."""

    share: float = 1.0
    """Weight of the key when keys compete for the engine."""

    traceparent: str | None = None
    """The caller's span (W3C), if it sent one."""

    load_policy: LoadPolicy | None = None
    load_timeout_s: float | None = None
    prefill: str = ""
    """Address of the prefill instance; empty prefills here."""

    local_fallback: bool = True
    """Whether to prefill here when the prefill instance refuses."""

    is_marked: bool = False
    """Whether each event carries a `ContinuationMark`, so that a router can resume the stream."""

    resumed: Sequence[ResumedOutput] = ()
    """The output of each choice so far if the stream began on another instance, else empty."""

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_choices

    @property
    def wants_prompt_logprobs(self) -> bool:
        return any(prompt.params.prompt_logprobs is not None for prompt in self.prompts)

    def prompt_of(self, index: int) -> GenerationPrompt:
        """The prompt of the choice `index`."""
        return self.prompts[index // self.num_choices]

    def resumed_of(self, index: int) -> ResumedOutput:
        """Output of the choice `index` that already exists."""
        return self.resumed[index] if self.resumed else _NO_OUTPUT


@dataclass(slots=True, kw_only=True)
class Delta:
    """The part of one choice that one engine output added. Not modified after it is built;
    frozen dataclasses cost too much per token."""

    index: int
    is_first: bool
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    finish_reason: str | None
    stop_reason: int | str | None
    parsed: ParsedOutput
    """The same text as content, reasoning and calls."""

    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt tokens from the second on, if requested; only in the
    first delta."""

    num_malformed: int = 0
    """Calls of the choice so far that could not be parsed."""


_CONTEXT_TOKENS = 16
"""The detokenizer gets this many of the last prompt tokens; it looks back on fewer."""

Emit = Callable[[Delta], Awaitable[None]]
Outputs = AsyncGenerator[SequenceOutput, None]


@dataclass(slots=True)
class Transcript:
    """The whole output of one choice."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    parsed: ParsedAnswer = field(default_factory=ParsedAnswer)
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_malformed: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def append(self, delta: Delta) -> None:
        """Add the next delta of the choice."""
        self.pieces.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.parsed.add(delta.parsed)
        self.num_malformed = delta.num_malformed
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


class ChoiceProgress:
    """Detokenizer state and usage of one choice."""

    def __init__(self, index: int, job: GenerationJob, tokenizer: Tokenizer) -> None:
        self.index = index
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        prompt, self.resumed = job.prompt_of(index), job.resumed_of(index)
        self._stream = TextStream(
            tokenizer,
            prompt=prompt.tokens[-_CONTEXT_TOKENS:].tolist(),
            stops=job.stops,
            include_stop=job.include_stop,
            skip_special_tokens=job.skip_special_tokens,
            shown_ids=job.parsing.shown_ids,
            min_tokens=prompt.params.min_tokens,
        )
        self._answer = AnswerReader(job.parsing, f"{job.name}:{index}")
        self._is_first = True
        self.replayed: list[Delta] = []
        """The output that exists already, as deltas."""
        if self.resumed.tokens:
            self.replayed.append(self.append(_output_of(self.resumed.tokens)))

    @property
    def num_tokens(self) -> int:
        return self._stream.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        return self._answer.num_reasoning_tokens

    def append(self, output: SequenceOutput) -> Delta:
        """The delta of one engine output; `finish_reason` is set when the choice has ended."""
        self.usage = self.usage or output.usage
        piece = self._stream.append_output(output)
        num_tokens = piece.num_tokens
        self.finish_reason = piece.finish_reason
        is_first, self._is_first = self._is_first, False
        is_end = piece.finish_reason is not None
        parsed = self._answer.read(piece.text, num_tokens, is_end=is_end)
        return Delta(
            index=self.index,
            is_first=is_first,
            text=piece.text,
            tokens=output.tokens[:num_tokens],
            logprobs=output.logprobs[:num_tokens],
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            parsed=parsed,
            prompt_logprobs=output.prompt_logprobs if is_first else None,
            num_malformed=self._answer.num_malformed,
        )


class Generation:
    """Runs one job. `emit` is awaited for each delta; deltas of one choice are in order."""

    def __init__(self, service: Service, job: GenerationJob) -> None:
        self._service = service
        self._job = job
        self._choices = [
            ChoiceProgress(index, job, service.tokenizer) for index in range(job.num_sequences)
        ]

    async def run(self, emit: Emit) -> None:
        """Run until every choice has ended. Cancelling aborts all of them.

        Raises QueueFull before anything starts, and RequestError or EngineDead when the engine
        raises it for one choice; the other choices are aborted then.
        """
        service, job = self._service, self._job
        async with AsyncExitStack() as stack:
            ids = stack.enter_context(
                service.live.enter(job.name, job.num_sequences, job.owner)
            )
            generate = service.engine.generate
            if job.owner:
                place = service.shared.enter_engine(job.owner, job.share, job.num_sequences)
                async with service.live.waiting(ids) as wait:
                    await stack.enter_async_context(place)
                if wait.when() is not None:
                    generate = aborted_outputs
            alive = [choice for choice in self._choices if not choice.resumed.has_ended]
            requests = [self._request(choice, ids) for choice in alive]
            if len(requests) == 1:
                await self._run_choice(alive[0], generate(requests[0]), requests[0], emit)
                return
            try:
                async with asyncio.TaskGroup() as group:
                    for choice, request in zip(alive, requests, strict=True):
                        outputs = generate(request)
                        group.create_task(self._run_choice(choice, outputs, request, emit))
            except BaseExceptionGroup as errors:
                raise _first(errors) from None

    def resumed(self) -> list[Delta]:
        """Output that another instance generated, as deltas. The client has it already."""
        return [delta for choice in self._choices for delta in choice.replayed]

    async def collect(self) -> list[Transcript]:
        """Run to the end and return the whole output of every choice. Raises RequestRefused if
        a choice was aborted or given back by the engine."""
        transcripts = [Transcript() for _ in self._choices]

        async def emit(delta: Delta) -> None:
            transcripts[delta.index].append(delta)

        await self.run(emit)
        reasons = {entry.finish_reason for entry in transcripts}
        if "abort" in reasons:
            raise RequestRefused("the request was aborted", status=499, code="aborted")
        if "returned" in reasons:
            raise RequestRefused(
                "the KV cache is full and this request was preempted for too long; retry on "
                "another instance",
                status=503,
                code="returned",
            )
        return transcripts

    async def _run_choice(
        self, choice: ChoiceProgress, outputs: Outputs, request: Request, emit: Emit
    ) -> None:
        timer = RequestTimer(self._service.recorder, self._service.clock)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    timer.record(output)
                    delta = choice.append(output)
                    await emit(delta)
                    if delta.finish_reason is not None:
                        break
        except QueueFull:  # over the limit of all workers together
            self._service.recorder.count(names.REFUSED)
            raise
        finally:
            self._end(choice, request, timer)

    def _end(self, choice: ChoiceProgress, request: Request, timer: RequestTimer) -> None:
        service, info = self._service, self._service.engine.info
        place = SequenceProgress(
            request_id=request.request_id,
            prompt_tokens=len(request.tokens),
            unix_s=service.unix_s(),
            token_bytes=info.block_bytes // info.block_tokens,
            traceparent=self._job.traceparent,
        )
        service.end(timer.end(choice.finish_reason or "abort", place=place), self._job.owner)
        if service.config.key_metrics and self._job.owner:
            num_tokens = len(request.tokens) + choice.num_tokens
            service.recorder.count(names.SEQUENCES_BY_KEY, label=self._job.owner)
            service.recorder.count(names.TOKENS_BY_KEY, num_tokens, label=self._job.owner)

    def _request(self, choice: ChoiceProgress, ids: Sequence[RequestId]) -> Request:
        job = self._job
        prompt, resumed = job.prompt_of(choice.index), choice.resumed.tokens
        return Request(
            request_id=ids[choice.index],
            tokens=prompt.followed_by(resumed),
            params=params_of_choice(prompt.params, choice.index % job.num_choices),
            arrival_s=self._service.clock.now(),
            priority=job.priority,
            cache_salt=job.cache_salt,
            session_id=job.session_id,
            cache_hint=job.cache_hint,
            load_policy=job.load_policy,
            load_timeout_s=job.load_timeout_s,
            prefill=job.prefill,
            local_fallback=job.local_fallback,
            can_return=job.is_marked,
            num_resumed_tokens=len(resumed),
        )

    def usage(self) -> UsageAnswer:
        """Token counts so far. A prompt counts once, whatever its number of choices."""
        usages = self._usages()
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._job.prompts)
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        # Resumed output tokens hit the cache but do not count as prompt tokens.
        found = sum(usage.cached_tokens for usage in usages)
        details = PromptTokensDetails(cached_tokens=min(found, prompt_tokens))
        if self._job.wants_cache_details:
            info = self._service.engine.info
            details.cache = cache_details(usages, info.block_tokens, info.block_bytes)
        return UsageAnswer(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=details,
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices)
            ),
        )

    def _usages(self) -> list[Usage]:
        """The first known usage of each prompt; the other choices of a prompt hit the same
        blocks."""
        many = self._job.num_choices
        groups = [self._choices[at : at + many] for at in range(0, len(self._choices), many)]
        known = [[choice.usage for choice in group if choice.usage] for group in groups]
        return [usages[0] for usages in known if usages]


def _output_of(tokens: Sequence[int]) -> SequenceOutput:
    """Existing tokens in the form of an engine output."""
    return SequenceOutput(request_id=RequestId(""), tokens=list(tokens), logprobs=[])


def _first(group: BaseExceptionGroup) -> BaseException:
    """The error that ended the other choices: one of Headwater's own if there is one."""
    ours = group.subgroup(HeadwaterError)
    error = (ours or group).exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
