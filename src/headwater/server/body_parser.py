"""Parses large JSON bodies in another process.

Parsing holds the interpreter lock, so a thread would not help: a body of 15 MB stops an event loop
for seconds. Bodies up to `INLINE_BYTES` are parsed in place within milliseconds. Longer ones go to a
worker process, which validates them and returns their token ids as packed arrays.

    request   length (8 bytes), length of the type's name (1), name, limit of ids (8), JSON
    response  length (8 bytes), msgpack: ParsedBody
"""

import asyncio
import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np

from headwater.server.body import INLINE_BYTES, decode_json
from headwater.server.errors import RequestRefused
from headwater.server.messages_schema import MessagesRequest
from headwater.server.responses_schema import ResponsesRequest
from headwater.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)

MAX_VALUES = 200_000
"""Most JSON values of a long body beside its token ids."""

MAX_IDS = 1 << 21
"""Most token ids of one list, for servers whose context is longer."""

_MAX_WORKERS = 2
_TIMEOUT_S = 30.0

S = TypeVar("S", bound=msgspec.Struct)

KINDS: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for kind in (
        ChatRequest,
        CompletionRequest,
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

    def __init__(self, max_ids: int = MAX_IDS) -> None:
        """`max_ids` is the most token ids that one list may have."""
        self._max_ids = max_ids
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._threads = ThreadPoolExecutor(_MAX_WORKERS, thread_name_prefix="body")
        self._slots = asyncio.Semaphore(_MAX_WORKERS)

    async def parse(self, raw: bytes, kind: type[S]) -> S:
        """The body as `kind`. Raises RequestRefused; never stops the event loop for long."""
        if len(raw) <= INLINE_BYTES:
            return decode_json(raw, kind)
        if kind.__name__ not in KINDS:
            raise RequestRefused(
                f"the body has {len(raw)} bytes; this endpoint takes at most {INLINE_BYTES}",
                status=413,
            )
        async with self._slots:
            parsed = await self._ask(raw, kind)
        if parsed.error is not None:
            raise RequestRefused(parsed.error, param=parsed.param, code=parsed.code)
        body = msgspec.msgpack.decode(parsed.body, type=kind)
        for ids, packed in zip(token_lists(body), parsed.ids, strict=True):
            ids += np.frombuffer(packed, dtype=np.int32).tolist()
            await asyncio.sleep(0)  # other requests run between two lists
        return body

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        for worker in self._all:
            worker.end()
        self._all.clear()
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, raw: bytes, kind: type[S]) -> ParsedBody:
        """Have a worker parse; a worker that fails or is interrupted is not used again."""
        worker = self._idle.pop() if self._idle else self._start()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await asyncio.get_running_loop().run_in_executor(
                    self._threads, worker.parse, raw, kind.__name__.encode(), self._max_ids
                )
        except BaseException as exc:
            self._all.discard(worker)
            worker.end()
            if not isinstance(exc, OSError | EOFError | TimeoutError):
                raise
            raise RequestRefused(
                f"the body could not be parsed within {_TIMEOUT_S:.0f} s and the memory for it; "
                "send a smaller one",
                status=413,
            ) from exc
        self._idle.append(worker)
        return answer

    def _start(self) -> "_Worker":
        worker = _Worker()
        self._all.add(worker)
        return worker


class _Worker:
    """One worker process. `parse` waits for pipes without the interpreter lock."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater.server.body_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the server, which ends it
        )

    def parse(self, raw: bytes, name: bytes, max_ids: int) -> ParsedBody:
        """Send a body and wait for the result. OSError or EOFError when the worker died."""
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None, "asked for a pipe"
        assert sink is not None, "asked for a pipe"
        head = len(name).to_bytes(1, "big") + name + max_ids.to_bytes(8, "big")
        sink.write((len(head) + len(raw)).to_bytes(8, "big") + head)
        sink.write(raw)
        sink.flush()
        size = int.from_bytes(source.read(8), "big")
        payload = source.read(size)
        if not size or len(payload) < size:
            raise EOFError("the worker ended")
        return msgspec.msgpack.decode(payload, type=ParsedBody)

    def end(self) -> None:
        """Kill it; a thread that waits for it sees the end of its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # half a body is left in its buffer
                    pipe.close()
