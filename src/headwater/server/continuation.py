"""Streams that another instance can resume when the instance that began them is lost.

A router requests such a stream with a header. Each event is then preceded by a comment with its
choice, its tokens and the seed. The router removes the comment before it sends the event to the
client. When the stream breaks, the router sends the tokens to another instance, which continues
exactly after them, even in the middle of a character.

    : headwater {"tokens":[17,4],"seed":7}
    data: {"choices":[…]}
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

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
    """Describes the event that follows it."""

    tokens: list[int] = []
    seed: int = 0
    index: int = 0
    """Index of the choice the tokens belong to."""

    num_choices: int = 1
    """Number of choices of the response."""

    created: int | None = None
    """`created` of the response; in the first mark of each choice."""

    has_ended: bool = False
    """The choice is complete."""

    is_part: bool = False
    """The event has no tokens. The router sends it together with the next event that is not a
    part."""

    has_failed: bool = False
    """The event is a failure of this instance; another instance may succeed."""

    is_returned: bool = False
    """The KV cache of this instance is full. It has not failed, and may have room later."""


FAILED = ContinuationMark(has_failed=True)
PART = ContinuationMark(is_part=True)
RETURNED = ContinuationMark(has_failed=True, is_returned=True)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ContinuationMark).decode


def mark_line(mark: ContinuationMark) -> bytes:
    """The comment line that precedes the `data:` line of an event."""
    return _PREFIX + _encode(mark) + b"\n"


def take_mark(event: bytes) -> tuple[ContinuationMark | None, bytes]:
    """The mark of an event (None without one) and the event without its mark.

    Raises ValueError for a malformed mark.
    """
    if not event.startswith(_PREFIX):
        return None, event
    line, _, rest = event.partition(b"\n")
    try:
        return _decode(line[len(_PREFIX) :]), rest
    except msgspec.DecodeError as exc:
        raise ValueError(f"malformed continuation mark: {exc}") from exc


def comment_of(delta: Delta, job: GenerationJob, service: Service) -> bytes:
    """The comment line for `delta` of a continuable request."""
    if delta.finish_reason == "returned":
        return mark_line(RETURNED)
    if delta.finish_reason == "abort" and service.is_stopping:
        return mark_line(FAILED)  # aborted by shutdown: another instance can continue
    mark = ContinuationMark(
        tokens=delta.tokens,
        seed=job.prompt_of(delta.index).params.seed,
        index=delta.index,
        num_choices=job.num_sequences,
        created=job.created if delta.is_first else None,
        has_ended=delta.finish_reason is not None,
    )
    return mark_line(mark)


def resume_outputs(body: Sampling, job: GenerationJob, info: EngineInfo) -> GenerationJob:
    """`job`, continued after the output tokens in `continue_choices`.

    Raises RequestRefused for tokens that cannot be the beginning of its output.
    """
    entries = body.continue_choices or []
    if not body.stream:
        raise RequestRefused(f"{FIELD} needs stream: true", param=FIELD)
    if len(entries) != job.num_sequences:
        raise RequestRefused(
            f"{FIELD} has {len(entries)} entries for {job.num_sequences} choices; send one "
            "entry per choice",
            param=FIELD,
        )
    for index, entry in enumerate(entries):
        _check(job.prompt_of(index), entry, info)
    many = job.num_choices
    prompts = [
        _seeded(prompt, entries[at * many : (at + 1) * many])
        for at, prompt in enumerate(job.prompts)
    ]
    resumed = [
        ResumedOutput(tokens=entry.token_ids, has_ended=entry.has_ended) for entry in entries
    ]
    created = next((entry.created for entry in entries if entry.created is not None), None)
    return replace(
        job,
        prompts=prompts,
        resumed=resumed,
        created=job.created if created is None else created,
    )


def _seeded(prompt: GenerationPrompt, entries: Sequence[ResumedChoice]) -> GenerationPrompt:
    """`prompt` with the seed of its first choice that has begun."""
    seed = next((entry.seed for entry in entries if entry.seed is not None), None)
    if seed is None:
        return prompt
    return replace(prompt, params=replace(prompt.params, seed=seed))


def _check(prompt: GenerationPrompt, entry: ResumedChoice, info: EngineInfo) -> None:
    """Check the resumed tokens. Those of finished choices are checked too, because they are
    detokenized like the others."""
    num_tokens, limit = len(entry.token_ids), prompt.params.max_tokens
    if num_tokens > limit or (num_tokens == limit and not entry.has_ended):
        raise RequestRefused(
            f"an entry of {FIELD} has {num_tokens} tokens and max_tokens is {limit}, so nothing is "
            "left to generate; raise max_tokens",
            param=FIELD,
        )
    if entry.token_ids:
        params.check_token_ids(max(entry.token_ids), info, param=FIELD)
    if not entry.has_ended:
        params.check_length(len(prompt.tokens) + num_tokens, info)
