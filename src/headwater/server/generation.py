"""One request's choices, from the engine's tokens to deltas of text.

The endpoints differ in how they write a delta; everything before that is here, once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

import numpy as np

from headwater.cache import Hint
from headwater.engine.text import TextStream
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import HeadwaterError
from headwater.metrics.recorder import RequestTimer, SequenceProgress
from headwater.scheduler.output import SequenceOutput, TokenLogprobs, Usage
from headwater.scheduler.request import Request, SamplingParams, params_of_choice
from headwater.server.answers import (
    CacheDetails,
    LoadDetails,
    PromptTokensDetails,
    UsageAnswer,
)
from headwater.server.service import Service
from headwater.types import LoadPolicy, RequestId, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPrompt:
    """One prompt and how to continue it."""

    tokens: Tokens
    params: SamplingParams

    def followed_by(self, said: Sequence[int]) -> Tokens:
        """The prompt, and what exists already of an answer to it."""
        if not said:
            return self.tokens
        return np.concatenate((self.tokens, np.array(said, dtype=np.int32)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedOutput:
    """What exists already of one choice: it goes on after that, or not at all."""

    tokens: Sequence[int] = ()
    has_ended: bool = False


NOTHING = ResumedOutput()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """All that one HTTP request wants generated."""

    name: str
    """The request id its client knows."""

    prompts: Sequence[GenerationPrompt]
    num_choices: int
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    session_id: str = ""
    cache_hint: Hint | None = None
    wants_cache_details: bool = False
    traceparent: str | None = None
    """The caller's span, where it named one."""
    load_policy: LoadPolicy | None = None
    load_timeout_s: float | None = None
    prefill: str = ""
    """Address of the instance that computes the prompts; empty computes them here."""

    local_fallback: bool = True
    """Whether they are computed here when that instance refuses."""

    is_marked: bool = False
    """Whether a stream says beside each event which tokens it stands for."""

    said: Sequence[ResumedOutput] = ()
    """One for each choice, where another instance began; else none."""

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_choices

    def prompt_of(self, index: int) -> GenerationPrompt:
        """What the choice `index` is an answer to."""
        return self.prompts[index // self.num_choices]

    def said_of(self, index: int) -> ResumedOutput:
        """What exists already of the choice `index`."""
        return self.said[index] if self.said else NOTHING


@dataclass(slots=True, kw_only=True)
class Delta:
    """What one output added to one choice. Built once, changed by nobody."""

    index: int
    is_first: bool
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    finish_reason: str | None
    stop_reason: int | str | None


_CONTEXT_TOKENS = 16
"""More of a prompt's end than the detokenizer looks back on."""

Emit = Callable[[Delta], Awaitable[None]]


class ChoiceProgress:
    """How far one choice got."""

    def __init__(self, index: int, job: GenerationJob, tokenizer: Tokenizer) -> None:
        self.index = index
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        prompt, self.said = job.prompt_of(index), job.said_of(index)
        self._stream = TextStream(
            tokenizer,
            prompt=prompt.tokens[-_CONTEXT_TOKENS:].tolist(),
            stops=job.stops,
            include_stop=job.include_stop,
            skip_special_tokens=job.skip_special_tokens,
            min_tokens=prompt.params.min_tokens,
        )
        self._is_first = not self.said.tokens
        if self.said.tokens:
            self._take_up(prompt.params.min_tokens)

    @property
    def num_tokens(self) -> int:
        return self._stream.num_tokens

    def _take_up(self, min_tokens: int) -> None:
        """Have said what exists already. Stop strings count from `min_tokens` on, so what is
        before and after that is landed apart."""
        early, said = max(min_tokens - 1, 0), self.said.tokens
        for part in (said[:early], said[early:]):
            self._stream.land(_landed(part))

    def land(self, output: SequenceOutput) -> Delta:
        """The delta of one output; its `finish_reason` is set once the choice has ended."""
        self.usage = self.usage or output.usage
        piece = self._stream.land(output)
        self.finish_reason = piece.finish_reason
        is_first, self._is_first = self._is_first, False
        return Delta(
            index=self.index,
            is_first=is_first,
            text=piece.text,
            tokens=output.tokens,
            logprobs=output.logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )


class Generation:
    """Runs one job. `emit` is awaited for each delta, in order within a choice."""

    def __init__(self, service: Service, job: GenerationJob) -> None:
        self._service = service
        self._job = job
        self._choices = [
            ChoiceProgress(index, job, service.tokenizer) for index in range(job.num_sequences)
        ]

    async def run(self, emit: Emit) -> None:
        """Until every choice has ended. Cancelling aborts them all.

        Raises QueueFull before anything starts; RequestError or EngineDead where the engine
        does, after which no choice of the job runs on.
        """
        service, job = self._service, self._job
        with service.live.enter(job.name, job.num_sequences) as ids:
            alive = [choice for choice in self._choices if not choice.said.has_ended]
            requests = [self._request(choice, ids) for choice in alive]
            if len(requests) == 1:
                await self._follow(alive[0], requests[0], emit)
                return
            try:
                async with asyncio.TaskGroup() as group:
                    for choice, request in zip(alive, requests, strict=True):
                        group.create_task(self._follow(choice, request, emit))
            except BaseExceptionGroup as errors:
                raise _first(errors) from None

    async def _follow(self, choice: ChoiceProgress, request: Request, emit: Emit) -> None:
        timer = RequestTimer(self._service.recorder, self._service.clock)
        try:
            async with aclosing(self._service.engine.generate(request)) as outputs:
                async for output in outputs:
                    timer.land(output)
                    delta = choice.land(output)
                    await emit(delta)
                    if delta.finish_reason is not None:
                        break
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
        service.end(timer.end(choice.finish_reason or "abort", place=place))

    def _request(self, choice: ChoiceProgress, ids: Sequence[RequestId]) -> Request:
        job = self._job
        prompt, said = job.prompt_of(choice.index), choice.said.tokens
        return Request(
            request_id=ids[choice.index],
            tokens=prompt.followed_by(said),
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
            num_resumed_tokens=len(said),
        )

    def usage(self) -> UsageAnswer:
        """Tokens so far. A prompt is counted once, however many choices it got."""
        usages = self._usages()
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._job.prompts)
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        # What exists already of an answer is found like a prompt, and is none.
        found = sum(usage.cached_tokens for usage in usages)
        details = PromptTokensDetails(cached_tokens=min(found, prompt_tokens))
        if self._job.wants_cache_details:
            details.cache = self._cache_details(usages)
        return UsageAnswer(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=details,
        )

    def _usages(self) -> list[Usage]:
        """Of each prompt the first that is known: its other choices found the same."""
        many = self._job.num_choices
        groups = [self._choices[at : at + many] for at in range(0, len(self._choices), many)]
        known = [[choice.usage for choice in group if choice.usage] for group in groups]
        return [usages[0] for usages in known if usages]

    def _cache_details(self, usages: Sequence[Usage]) -> CacheDetails:
        def found(tier: str) -> int:
            return sum(usage.by_tier.get(tier, 0) for usage in usages)

        info = self._service.engine.info
        loads = [usage.load for usage in usages if usage.load is not None]
        reasons = [usage.miss_reason for usage in usages if usage.miss_reason is not None]
        return CacheDetails(
            device=found("device"),
            host=found("host"),
            storage=found("storage"),
            peer=found("peer"),
            recomputed=sum(usage.computed for usage in usages),
            miss_reason=reasons[0] if reasons else None,
            block_tokens=info.block_tokens,
            queued_s=max((usage.queued_s for usage in usages), default=0.0),
            loaded_bytes=(found("host") + found("storage") + found("peer"))
            * (info.block_bytes // info.block_tokens),
            load=LoadDetails(**asdict(loads[0])) if loads else None,
        )


def _landed(tokens: Sequence[int]) -> SequenceOutput:
    """Tokens as if they had just been generated."""
    return SequenceOutput(
        request_id=RequestId(""),
        tokens=list(tokens),
        logprobs=[],
        finish_reason=None,
        stop_token=None,
        usage=None,
    )


def _first(group: BaseExceptionGroup) -> BaseException:
    """The error that ended the others: of several choices refused, any one says why."""
    ours = group.subgroup(HeadwaterError)
    error = (ours or group).exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
