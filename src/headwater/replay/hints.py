"""Hints that the clients of a trace would give if they knew the future."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from headwater.cache import Hint
from headwater.replay.optimum import NEVER, next_uses
from headwater.replay.trace import TraceRequest
from headwater.replay.variants import trunks

HINTS = ("none", "perfect")


class SessionHint(NamedTuple):
    """The session of one request, and the client's hint about it."""

    session: str = ""
    hint: Hint | None = None


NOTHING = SessionHint()


def hints_of(requests: Sequence[TraceRequest], kind: str) -> list[SessionHint]:
    """The hint of each request: none, or whether its session continues.

    A session continues when a later request has most of its full blocks; beginnings that
    sessions share do not count. The hint does not say when or how often.
    """
    if kind == "none":
        return [NOTHING] * len(requests)
    shared = trunks(requests)
    uses = next_uses([request.hash_ids for request in requests])
    return [_hint_of(request, use, shared) for request, use in zip(requests, uses, strict=True)]


def with_hints(requests: Sequence[TraceRequest], kind: str) -> list[TraceRequest]:
    """The same requests, each with its hint of `hints_of`."""
    if kind == "none":
        return list(requests)
    hints = hints_of(requests, kind)
    return [
        replace(request, **hint._asdict())
        for request, hint in zip(requests, hints, strict=True)
    ]


def _hint_of(request: TraceRequest, uses: Sequence[int], shared: set[int]) -> SessionHint:
    ids = request.hash_ids
    own = [at for at, block in enumerate(ids) if block not in shared]
    full = [at for at in own if at < request.input_length // request.block_tokens]
    session = ids[own[0]] if own else ids[-1] if ids else 0
    returning = sum(uses[at] != NEVER for at in full)
    return SessionHint(str(session), Hint(closed=2 * returning <= len(full)))
