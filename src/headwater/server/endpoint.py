"""Shared by the generating endpoints: checks the request, builds the job, sends the result.

begin(request, ChatRequest) → prompt tokens → make_job(...) → respond(request, reply)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from headwater.server import params
from headwater.server.answers import UsageAnswer
from headwater.server.body import (
    ASGIResponse,
    JsonResponse,
    check_supported,
    read_body,
    request_id_of,
    traceparent,
)
from headwater.server.continuation import (
    FAILED,
    HEADER,
    PART,
    comment_of,
    mark_line,
    resume_outputs,
)
from headwater.server.errors import RequestRefused
from headwater.server.generation import (
    Delta,
    Generation,
    GenerationJob,
    GenerationPrompt,
    Transcript,
)
from headwater.server.logprobs import num_scored_tokens
from headwater.server.middleware import access_of
from headwater.server.params import session_name
from headwater.server.parsing.model_output import PLAIN_TEXT, AnswerParsing
from headwater.server.router.protocol import FALLBACK_HEADER, PREFILL_HEADER
from headwater.server.schema import Sampling
from headwater.server.service import Service
from headwater.server.streaming import EventStream, EventStyle, stream, while_connected
from headwater.types import Tokens

B = TypeVar("B", bound=Sampling)

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[B]):
    """One checked request to a generating endpoint."""

    request: Request
    service: Service
    body: B
    request_id: str


class ReplyFormat(Protocol):
    """How one endpoint writes its output. Called on the event loop."""

    style: EventStyle
    """The format of its events in a stream."""

    reports_usage: bool
    """Whether its first and last events contain the usage."""

    def whole(self, transcripts: Sequence[Transcript], usage: UsageAnswer) -> Struct:
        """The body of a response that is not streamed."""

    def events(self, delta: Delta, usage: UsageAnswer | None) -> list[Struct]:
        """The events of one delta; empty if the delta adds nothing visible.

        When a stream is continued here, this method is also called for the existing output, and
        its result is dropped: the call only updates the state of the format.
        """

    def usage_event(self, usage: UsageAnswer) -> Struct:
        """The last event of a stream with `include_usage`."""


async def begin(request: Request, kind: type[B]) -> Call[B]:
    """Read and check the request. Raises RequestRefused."""
    service: Service = request.app.state.service
    limit = service.config.limits.max_body_bytes
    return await accept(request, await read_body(request, kind, max_bytes=limit))


async def accept(request: Request, body: B) -> Call[B]:
    """Check a request whose body was read before. Raises RequestRefused."""
    service: Service = request.app.state.service
    request_id = request_id_of(request, body)
    check_supported(body)
    service.check_model(body.model)
    if service.engine.info.role == "prefill":
        raise RequestRefused(
            "this instance only prefills for other instances; send the request to the router or "
            "to an instance with the role decode or mixed",
            code="prefill_only",
        )
    return Call(request=request, service=service, body=body, request_id=request_id)


def make_job(  # noqa: PLR0913 -- what an endpoint adds, each by its name
    call: Call[B],
    prompts: Sequence[Tokens],
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: str = "",
    parsing: AnswerParsing = PLAIN_TEXT,
) -> GenerationJob:
    """The job of one call, with every limit checked.

    With `default_max_tokens` None, output without `max_tokens` may fill the context.
    """
    service, body = call.service, call.body
    limits, info = service.config.limits, service.engine.info
    caller = access_of(call.request).caller
    num_choices = params.num_choices(body, limits)
    service.live.check_size(len(prompts) * num_choices)
    if prompt_logprobs is None:
        prompt_logprobs = params.num_logprobs(
            body.prompt_logprobs, limits, param="prompt_logprobs"
        )

    def prompt_of(tokens: Tokens) -> GenerationPrompt:
        params.check_prompt(tokens, info)
        sampling = params.sampling_params(
            body,
            max_tokens=params.max_tokens(
                max_tokens, len(tokens), info, default=default_max_tokens
            ),
            logprobs=logprobs,
            limits=limits,
            info=info,
        )
        if grammar:
            sampling = replace(sampling, grammar=grammar)
        if prompt_logprobs is not None:
            params.check_prompt_logprobs(prompt_logprobs, len(tokens))
            sampling = replace(sampling, prompt_logprobs=prompt_logprobs)
        return GenerationPrompt(tokens=tokens, params=sampling)

    job = GenerationJob(
        name=call.request_id,
        prompts=[prompt_of(tokens) for tokens in prompts],
        num_choices=num_choices,
        stops=params.stop_strings(body, limits),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        parsing=parsing,
        priority=params.priority(body, service.engine_config),
        cache_salt=body.cache_salt or caller.cache_salt,
        session_id=session_name(body),
        cache_hint=params.cache_hint(body),
        owner=caller.name,
        share=caller.share,
        created=service.created_now(),
        wants_cache_details=bool(body.cache_details),
        load_policy=body.load_policy,
        load_timeout_s=body.load_timeout_s,
        traceparent=traceparent(call.request),
        is_marked=HEADER in call.request.headers,
    )
    job = _with_prefill(call.request, service, job)
    return resume_outputs(body, job, info) if body.continue_choices else job


async def respond(call: Call[B], job: GenerationJob, form: ReplyFormat) -> ASGIResponse:
    """Run `job` and send its output in `form`: whole, or as a stream."""
    generation = Generation(call.service, job)
    if call.body.stream:
        return _streamed(call, job, generation, form)

    async def whole() -> Struct:
        transcripts = await generation.collect()
        num_scored = sum(map(num_scored_tokens, transcripts))
        return await call.service.convert_logprobs(
            lambda: form.whole(transcripts, generation.usage()), num_scored
        )

    body = await while_connected(call.request.receive, whole())
    return JsonResponse(body, headers={"x-request-id": call.request_id})


def _streamed(
    call: Call[B], job: GenerationJob, generation: Generation, form: ReplyFormat
) -> ASGIResponse:
    options = call.body.stream_options
    has_running_usage = bool(options and options.continuous_usage_stats)

    async def respond_with_stream(scope: Scope, receive: Receive, send: Send) -> None:
        events = EventStream(
            send,
            [(b"x-request-id", call.request_id.encode())],
            on_failure=mark_line(FAILED) if job.is_marked else b"",
            style=form.style,
        )
        part = mark_line(PART) if job.is_marked else b""

        async def emit(delta: Delta) -> None:
            is_edge = delta.is_first or delta.finish_reason is not None
            has_usage = has_running_usage or (form.reports_usage and is_edge)
            usage = generation.usage() if has_usage else None
            comment = comment_of(delta, job, call.service) if job.is_marked else b""
            written = await call.service.convert_logprobs(
                lambda: form.events(delta, usage), num_scored_tokens(delta)
            )
            await events.write(*written, comment=comment, part=part)

        async def work() -> None:
            for delta in generation.resumed():
                form.events(delta, generation.usage() if form.reports_usage else None)
            await generation.run(emit)
            if options and options.include_usage:
                await events.write(form.usage_event(generation.usage()))

        await stream(events, receive, work)

    return respond_with_stream


def _with_prefill(request: Request, service: Service, job: GenerationJob) -> GenerationJob:
    """`job`, with the prefill instance that the router names in its headers."""
    address = request.headers.get(PREFILL_HEADER)
    if address is None or job.wants_prompt_logprobs:
        return job  # log-probabilities of a prompt come from the instance that computes it
    if not service.engine.info.peer_address:
        raise RequestRefused(
            f"{PREFILL_HEADER} names a prefill instance, but this instance takes no hand-offs; "
            "start it with --splitwise-role",
            code="no_peers",
        )
    if not access_of(request).is_cluster:
        raise RequestRefused(
            f"{PREFILL_HEADER} is accepted from the router only, and the peer token is "
            f"missing or wrong; send the request to the router",
            status=403,
            code="peer_token",
        )
    if not _ADDRESS.fullmatch(address):
        raise RequestRefused(
            f"{PREFILL_HEADER} must be HOST:PORT, got {address[:256]!r}", code="bad_address"
        )
    local = request.headers.get(FALLBACK_HEADER) == "local"
    return replace(job, prefill=address, local_fallback=local)
