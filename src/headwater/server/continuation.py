"""Streams that can go on elsewhere, when the instance that began them is lost.

A router asks for it with a header. Beside each event it is then told, in a comment that it
takes out again, which tokens of which choice the event stands for, and the seed; another
instance that is given those tokens goes on exactly where the stream broke, in the middle of a
character if need be.

    : headwater {"tokens":[17,4],"seed":7}
    data: {"choices":[…]}
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request

from headwater.engine.client import EngineInfo
from headwater.server import params
from headwater.server.errors import RequestRefused
from headwater.server.generation import Delta, GenerationJob, GenerationPrompt, ResumedOutput
from headwater.server.schema import ResumedChoice, Sampling
from headwater.server.service import Service

HEADER = "x-headwater-continuable"
FIELD = "continue_choices"

_PREFIX = b": headwater "


class ContinuationMark(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What the event that follows stands for."""

    tokens: list[int] = []
    seed: int = 0
    index: int = 0
    """Of the choice that these tokens are of."""

    num_choices: int = 1
    """How many choices the answer has."""

    has_ended: bool = False
    """This choice is whole; nothing more of it comes."""

    has_failed: bool = False
    """What follows is an error of this instance, which another might not have."""

    is_returned: bool = False
    """This instance has no room for the rest: it has not failed, and may have some later."""


FAILED = ContinuationMark(has_failed=True)
RETURNED = ContinuationMark(has_failed=True, is_returned=True)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ContinuationMark).decode


def mark_line(mark: ContinuationMark) -> bytes:
    """The comment that goes before the `data:` of an event."""
    return _PREFIX + _encode(mark) + b"\n"


def take_mark(event: bytes) -> tuple[ContinuationMark | None, bytes]:
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


def comment_of(delta: Delta, job: GenerationJob, service: Service) -> bytes:
    """The comment beside `delta`; empty where nobody asked."""
    if not job.is_marked:
        return b""
    if delta.finish_reason == "returned":
        return mark_line(RETURNED)
    if delta.finish_reason == "abort" and service.is_stopping:
        return mark_line(FAILED)  # what this server has no time for, another may have
    mark = ContinuationMark(
        tokens=delta.tokens,
        seed=job.prompt_of(delta.index).params.seed,
        index=delta.index,
        num_choices=job.num_sequences,
        has_ended=delta.finish_reason is not None,
    )
    return mark_line(mark)


def continued(
    request: Request, body: Sampling, job: GenerationJob, info: EngineInfo
) -> GenerationJob:
    """`job` as the request wants it: marked, or taken up after tokens that exist already.

    Raises Refused for tokens that cannot be the beginning of its answer.
    """
    job = replace(job, is_marked=HEADER in request.headers)
    found = body.continue_choices
    if not found:
        return job
    if len(found) != job.num_sequences or not body.stream:
        raise RequestRefused(
            f"a stream of {job.num_sequences} choices is continued with as many; these are "
            f"{len(found)}",
            param=FIELD,
        )
    many = job.num_choices
    prompts = [
        _seeded(prompt, found[at * many : (at + 1) * many])
        for at, prompt in enumerate(job.prompts)
    ]
    said = [ResumedOutput(tokens=entry.token_ids, has_ended=entry.has_ended) for entry in found]
    job = replace(job, prompts=prompts, said=said)
    for index, entry in enumerate(said):
        _check(job.prompt_of(index), entry, info)
    return job


def _seeded(prompt: GenerationPrompt, entries: Sequence[ResumedChoice]) -> GenerationPrompt:
    """`prompt` with the seed its choices began with, where one of them has begun."""
    seed = next((entry.seed for entry in entries if entry.seed is not None), None)
    if seed is None:
        return prompt
    return replace(prompt, params=replace(prompt.params, seed=seed))


def _check(prompt: GenerationPrompt, said: ResumedOutput, info: EngineInfo) -> None:
    if not said.has_ended and len(said.tokens) >= prompt.params.max_tokens:
        raise RequestRefused("nothing is left to generate after these tokens", param=FIELD)
    if not said.has_ended:
        params.check_prompt(prompt.followed_by(said.tokens), info)
