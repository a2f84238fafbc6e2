"""Server-sent events, and cancelling work whose client has disconnected.

The status line is sent together with the first event. A failure before that is an ordinary
error response. A failure after it is an `error` event that ends the stream.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Send

from headwater.errors import HeadwaterError, RequestError
from headwater.server.errors import error_answer, error_response

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells proxies such as nginx not to buffer events
]

_LINE_BREAKS = {
    "\u0085".encode(): b"\\u0085",
    "\u2028".encode(): b"\\u2028",
    "\u2029".encode(): b"\\u2029",
}
"""Characters that do not end a line of server-sent events, but at which `splitlines`, which
some clients use, would split."""

_encode = msgspec.json.Encoder().encode


def encode(value: object) -> bytes:
    """`value` as JSON in one line. Characters that any client may take for a line break are escaped."""
    data = _encode(value)
    if b"\xc2\x85" in data or b"\xe2\x80" in data:
        # In JSON these characters occur only inside strings, where an escape means the same.
        for raw, escaped in _LINE_BREAKS.items():
            data = data.replace(raw, escaped)
    return data


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. When the client disconnects first, `work` is cancelled and
    ClientDisconnected is raised."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStyle:
    """How an API writes its events."""

    is_named: bool = False
    """Whether an `event:` line repeats the `type` of each event."""

    last: bytes = DONE
    """The end of a stream."""

    error: Callable[[HeadwaterError], Any] = error_answer
    """The event of a failure inside a stream, and the body of a failure before it."""

    def write(self, event: msgspec.Struct) -> bytes:
        """One event as it is sent."""
        data = b"data: " + encode(event) + b"\n\n"
        if not self.is_named:
            return data
        name: str = event.type  # type: ignore[attr-defined]  # named events have one
        return b"event: " + name.encode() + b"\n" + data


OPENAI_EVENTS = EventStyle()


class EventStream:
    """Writes one streamed response."""

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        *,
        on_failure: bytes = b"",
        style: EventStyle = OPENAI_EVENTS,
    ) -> None:
        """`on_failure` is a comment line that precedes the `error` event of a server failure."""
        self._style = style
        self._send = send
        self._headers = _HEADERS + headers
        self._on_failure = on_failure
        self._has_begun = False
        self._write_lock = asyncio.Lock()
        """Choices write concurrently, and a write may wait for a slow client."""

    async def write(
        self, *events: msgspec.Struct, comment: bytes = b"", part: bytes = b""
    ) -> None:
        """Send events in one piece. `comment` is a line placed before the last of them, `part`
        one placed before each of the others. Without events only the comment is sent."""
        if not events:
            if comment:
                await self._write(comment + b"\n")
            return
        *before, last = [self._style.write(event) for event in events]
        await self._write(b"".join(part + event for event in before) + comment + last)

    async def end(self) -> None:
        """Send the end of a stream, and end the response."""
        await self._write(self._style.last, more=False)

    async def fail(self, error: HeadwaterError, receive: Receive) -> None:
        """Send the error: as an event if the stream has begun, otherwise as a response."""
        if self._has_begun:
            comment = b"" if isinstance(error, RequestError) else self._on_failure
            event = self._style.write(self._style.error(error))
            await self._write(comment + event + self._style.last, more=False)
        else:
            response = error_response(error, self._style.error(error))
            response.raw_headers.extend(self._headers[len(_HEADERS) :])
            await response({"type": "http"}, receive, self._send)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        async with self._write_lock:
            if not self._has_begun:
                self._has_begun = True
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": self._headers}
                )
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def stream(
    events: EventStream, receive: Receive, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run `work`, which writes to `events`, until it ends, fails or the client disconnects."""
    try:
        await while_connected(receive, work())
        await events.end()
    except HeadwaterError as error:
        await events.fail(error, receive)
    except ClientDisconnected:
        return


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
