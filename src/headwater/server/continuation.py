"""Streams that can go on elsewhere, when the instance that began them is lost.

A router asks for it with a header. Beside each event it is then told, in a comment that it
takes out again, which tokens the event stands for and the seed; another instance that is given
those tokens goes on exactly where the stream broke, in the middle of a character if need be.

    : headwater {"tokens":[17,4],"seed":7}
    data: {"choices":[…]}
"""

from dataclasses import replace

import msgspec
from starlette.requests import Request

from headwater.engine.client import EngineInfo
from headwater.server import params
from headwater.server.errors import Refused
from headwater.server.generation import Delta, Job
from headwater.server.schema import Sampling
from headwater.server.service import Service

HEADER = "x-headwater-continuable"
FIELD = "continue_token_ids"

_PREFIX = b": headwater "


class Mark(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What the event that follows stands for."""

    tokens: list[int] = []
    seed: int = 0
    has_ended: bool = False
    """The answer is whole; only the end of the stream is missing."""

    has_failed: bool = False
    """What follows is an error of this instance, which another might not have."""


FAILED = Mark(has_failed=True)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Mark).decode


def mark_line(mark: Mark) -> bytes:
    """The comment that goes before the `data:` of an event."""
    return _PREFIX + _encode(mark) + b"\n"


def take_mark(event: bytes) -> tuple[Mark | None, bytes]:
    """The mark of an event, if it has one, and the event without it.

    Raises ValueError for a mark that cannot be read.
    """
    if not event.startswith(_PREFIX):
        return None, event
    line, _, rest = event.partition(b"\n")
    try:
        return _decode(line[len(_PREFIX) :]), rest
    except msgspec.DecodeError as exc:
        raise ValueError(f"a mark that cannot be read: {exc}") from exc


def comment_of(delta: Delta, job: Job, service: Service) -> bytes:
    """The comment beside `delta`; empty where nobody asked."""
    if not job.is_marked:
        return b""
    is_stopped = delta.finish_reason == "abort" and service.is_stopping
    if is_stopped or delta.finish_reason == "returned":
        return mark_line(FAILED)  # what this server has no time or room for, another may have
    seed, has_ended = job.prompts[0].params.seed, delta.finish_reason is not None
    return mark_line(Mark(tokens=delta.tokens, seed=seed, has_ended=has_ended))


def continued(request: Request, body: Sampling, job: Job, info: EngineInfo) -> Job:
    """`job` as the request wants it: marked, or taken up after tokens that exist already.

    Raises Refused for tokens that cannot be the beginning of its answer.
    """
    can_continue = _can_continue(job)
    job = replace(job, is_marked=HEADER in request.headers and can_continue)
    if not body.continue_token_ids:
        return job
    prompt = job.prompts[0]
    prompt = replace(prompt, said=body.continue_token_ids)
    if not can_continue or len(prompt.said) >= prompt.params.max_tokens:
        raise Refused("these tokens cannot be continued in this request", param=FIELD)
    params.check_prompt(prompt.whole, info)
    return replace(job, prompts=[prompt])


def _can_continue(job: Job) -> bool:
    """Whether the rest of an answer depends on nothing but the tokens so far and the seed."""
    sampling = job.prompts[0].params
    return (
        job.num_sequences == 1
        and sampling.logprobs is None
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
    )
