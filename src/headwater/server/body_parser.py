"""Parses JSON bodies; long ones in another process (`worker_pool`).

Bodies up to `INLINE_BYTES` are parsed in place within milliseconds. Longer ones go to a worker,
which validates them and returns their token ids as packed arrays.
"""

import asyncio
from typing import TypeVar

import msgspec
import numpy as np

from headwater.server.body import INLINE_BYTES, decode_json, is_short
from headwater.server.errors import RequestRefused
from headwater.server.messages_schema import CountTokensRequest, MessagesRequest
from headwater.server.responses_schema import ResponsesRequest
from headwater.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from headwater.server.worker_pool import WorkerPool

_MAX_IDS = 1 << 21
"""Maximum number of token ids that one list may have, however long the context of the model
is."""

S = TypeVar("S", bound=msgspec.Struct)

KINDS: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for kind in (
        ChatRequest,
        CompletionRequest,
        CountTokensRequest,
        DetokenizeRequest,
        MessagesRequest,
        ResponsesRequest,
        TokenizeRequest,
    )
}
"""Bodies that may be long. Others are limited to `INLINE_BYTES`."""


class ParsedBody(msgspec.Struct, array_like=True):
    """What a worker returns."""

    body: bytes = b""
    """The struct as msgpack, without its token ids."""

    ids: list[bytes] = []
    """Its token ids, int32, in the order of `token_lists`."""

    error: str | None = None
    param: str | None = None
    code: str | None = None


def token_lists(body: msgspec.Struct) -> list[list[int]]:
    """The lists of token ids in a body, wherever its type has them."""
    found: list[list[int]] = []
    if isinstance(body, Sampling):
        found += [entry.token_ids for entry in body.continue_choices or []]
    if isinstance(body, DetokenizeRequest):
        found.append(body.tokens)
    if isinstance(body, CompletionRequest) and isinstance(body.prompt, list):
        nested = [entry for entry in body.prompt if isinstance(entry, list)]
        found += nested or [body.prompt]  # type: ignore[list-item]  # checked when packed
    return found


class BodyParser:
    """Parses bodies for one event loop; `close` ends its worker processes."""

    def __init__(self, max_ids: int = _MAX_IDS) -> None:
        """`max_ids` is the maximum number of token ids in one list."""
        self._max_ids = max_ids
        self._workers = WorkerPool("headwater.server.body_worker")

    async def parse(self, raw: bytes, kind: type[S]) -> S:
        """The body as `kind`. Raises RequestRefused. Never blocks the event loop for long."""
        if is_short(raw):
            return decode_json(raw, kind)
        if kind.__name__ not in KINDS:
            raise RequestRefused(
                f"the body has {len(raw)} bytes; this endpoint takes at most {INLINE_BYTES}; "
                f"send a shorter one",
                status=413,
            )
        result = await self._workers.ask(kind.__name__, raw, self._max_ids)
        parsed = msgspec.msgpack.decode(result, type=ParsedBody)
        if parsed.error is not None:
            raise RequestRefused(parsed.error, param=parsed.param, code=parsed.code)
        body = msgspec.msgpack.decode(parsed.body, type=kind)
        for ids, packed in zip(token_lists(body), parsed.ids, strict=True):
            ids += np.frombuffer(packed, dtype=np.int32).tolist()
            await asyncio.sleep(0)  # other requests run between two lists
        return body

    def close(self) -> None:
        """End the workers. Calling it twice is safe."""
        self._workers.close()
