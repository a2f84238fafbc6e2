"""Server-sent events, and the end of work whose client has gone.

The status line is sent with the first event, so whatever fails before it is an ordinary
error answer; whatever fails after it is an `error` event and the end of the stream.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Send

from headwater.errors import HeadwaterError, RequestError
from headwater.server.errors import error_answer, error_response

T = TypeVar("T")

_DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect events
]

encode = msgspec.json.Encoder().encode


class ClientDisconnected(Exception):
    """The client closed its connection; nobody reads an answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if the client goes first, `work` is cancelled and Gone raised."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for pending in (task, watch):
            if not pending.done():
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pending


class EventStream:
    """One streamed answer."""

    def __init__(
        self, send: Send, headers: list[tuple[bytes, bytes]], *, on_failure: bytes = b""
    ) -> None:
        """`on_failure` is a comment line before the event that says that this server failed."""
        self._send = send
        self._headers = _HEADERS + headers
        self._on_failure = on_failure
        self._has_begun = False
        self._turn = asyncio.Lock()
        """Choices write side by side, and a full connection may hold up the first of them."""

    async def write(self, *events: msgspec.Struct, comment: bytes = b"") -> None:
        """Send events in one piece; `comment`, a line, belongs to the last of them."""
        *before, last = [b"data: " + encode(event) + b"\n\n" for event in events]
        await self._write(b"".join(before) + comment + last)

    async def end(self) -> None:
        """Send the last event there is."""
        await self._write(_DONE, more=False)

    async def fail(self, error: HeadwaterError, receive: Receive) -> None:
        """Tell the client, in whichever way is still possible."""
        if self._has_begun:
            comment = b"" if isinstance(error, RequestError) else self._on_failure
            event = b"data: " + encode(error_answer(error)) + b"\n\n"
            await self._write(comment + event + _DONE, more=False)
        else:
            response = error_response(error)
            response.raw_headers.extend(self._headers[len(_HEADERS) :])
            await response({"type": "http"}, receive, self._send)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        async with self._turn:
            if not self._has_begun:
                self._has_begun = True
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": self._headers}
                )
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def stream(
    events: EventStream, receive: Receive, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run `work`, which writes to `events`, to its end, its failure, or the client's leaving."""
    try:
        await while_connected(receive, work())
        await events.end()
    except HeadwaterError as error:
        await events.fail(error, receive)
    except ClientDisconnected:
        return  # nobody is left to tell


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
