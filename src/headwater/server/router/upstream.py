"""One attempt: forward a request to one instance and pass the response back as it arrives.

The client gets nothing before the first whole event. An attempt that fails before that can be
repeated on another instance unnoticed; one that fails later can be continued there when
`StreamProgress.can_continue`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
import msgspec
from starlette.types import Message, Send
from yarl import URL

from headwater.clock import Clock
from headwater.server.body import pieces
from headwater.server.errors import ErrorAnswer, RequestRefused
from headwater.server.router.instance import Instance
from headwater.server.router.route_selector import RouteChoice
from headwater.server.router.stream_progress import (
    EventSplitter,
    InstanceFailed,
    InstanceFull,
    StreamProgress,
)
from headwater.server.streaming import DONE

RETURNED = "returned"
"""Failure reason: the KV cache of the instance is full; the instance has not failed."""

PEER_REFUSED = "peer_refused"
"""Failure reason: the prefill instance refused the hand-off."""

_NO_ROOM = "no_room"
"""Error code of a decode instance that has no room for the blocks of a hand-off."""

_PASSED_BACK = (
    "content-type",
    "cache-control",
    "retry-after",
    "www-authenticate",
    "x-request-id",
)
_TRY_ELSEWHERE = frozenset({429, 503})
_CANNOT_SERVE = frozenset({"draining", "engine_dead", "engine_restarting", "not_ready"})
_MAX_ANSWER_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """Why an attempt did not complete the response."""

    reason: str
    """One word, used as a metric label."""

    status: int = 502
    body: bytes = b""
    """The instance's response body, if there was one."""

    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedRequest:
    """A request as it is sent to an instance."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Attempt:
    """Owns the connection to one instance for one request."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        clock: Clock,
        route: RouteChoice,
        send: Send,
        progress: StreamProgress,
    ) -> None:
        """`progress` is shared by all attempts of the request."""
        self._session = session
        self._clock = clock
        self._route = route
        self._send = send
        self._progress = progress
        self._load = _LoadCount(route)
        self._scope = asyncio.timeout(None)
        """Expires when the instance is lost."""

    async def run(self, forwarded: ForwardedRequest) -> AttemptFailure | None:
        """Returns None when the client has the whole response. Cancelling closes the
        connection, which aborts the request on the instance."""
        server = self._route.server
        route, now = self._route, self._clock.now()
        route.worker.recent.add(route.uncached_tokens, now=now)
        if route.prefill is not None:
            server.recent.add(route.moved_tokens, now=now)
        try:
            with self._load.counted():
                async with (
                    self._ends_with_instance(),
                    self._session.request(
                        forwarded.method,
                        # `encoded` keeps the path: yarl would resolve dot segments.
                        URL(server.registration.url + forwarded.path, encoded=True),
                        data=pieces(forwarded.body) if forwarded.body else None,
                        headers={
                            **forwarded.headers,
                            "content-length": str(len(forwarded.body)),
                        },
                    ) as answer,
                ):
                    return await self._pass_back(answer)
        except InstanceFull:
            return AttemptFailure(reason=RETURNED, status=503)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, InstanceFailed) as exc:
            server.has_failed = True
            return AttemptFailure(reason=_reason(exc))

    async def _pass_back(self, answer: aiohttp.ClientResponse) -> AttemptFailure | None:
        if answer.content_type == "text/event-stream" and answer.status == 200:
            return await self._stream(answer)
        body = await _read(answer)
        headers = _headers(answer, self._route.server)
        if answer.status in _TRY_ELSEWHERE or self._progress.has_begun:
            reason = _error_code(body) or str(answer.status)
            self._route.server.has_failed |= reason in _CANNOT_SERVE
            return AttemptFailure(
                reason=reason, status=answer.status, body=body, headers=headers
            )
        size = (b"content-length", str(len(body)).encode())
        await self._begin(answer.status, (*headers, size))
        await self._deliver({"type": "http.response.body", "body": body})
        return None

    async def _stream(self, answer: aiohttp.ClientResponse) -> AttemptFailure | None:
        """Pass on whole events; a stream without its last event is a failure."""
        splitter, is_last = EventSplitter(), False
        async for piece in answer.content.iter_any():
            self._route.server.seen_s = self._clock.now()  # counts as a heartbeat
            whole = splitter.feed(piece)
            events = self._progress.strip(whole) if whole else b""
            if not events:
                continue
            self._load.prefilled()
            if not self._progress.has_begun:
                await self._begin(200, _headers(answer, self._route.server))
            is_last = events.endswith(DONE)
            await self._deliver(
                {"type": "http.response.body", "body": events, "more_body": not is_last}
            )
        if is_last:
            return None
        if self._progress.has_ended:
            await self._deliver({"type": "http.response.body", "body": b"", "more_body": False})
            return None
        self._route.server.has_failed = True
        return AttemptFailure(reason="broken_stream")

    @asynccontextmanager
    async def _ends_with_instance(self) -> AsyncIterator[None]:
        """A context in which TimeoutError is raised when the instance is lost."""
        timeouts = self._route.server.timeouts
        async with self._scope:
            timeouts.add(self._scope)
            try:
                yield
            finally:
                timeouts.discard(self._scope)

    async def _deliver(self, message: Message) -> None:
        """Send to the client. The loss of the instance does not interrupt this, however slow
        the client is, so that it is known afterwards what the client has."""
        server, scope = self._route.server, self._scope
        server.timeouts.discard(scope)
        scope.reschedule(None)
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            return  # the client has the whole response
        server.timeouts.add(scope)
        if server.is_gone:
            scope.reschedule(asyncio.get_running_loop().time())

    async def _begin(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self._progress.has_begun = True
        await self._deliver(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )


async def end_stream(send: Send, progress: StreamProgress) -> None:
    """End a broken stream with an error event, or without an error if only its end is
    missing."""
    style, event = progress.style, b""
    if not progress.is_whole:
        error = RequestRefused(
            "the instance that generated this response was lost and no other could continue it; "
            "send the request again",
            status=503,
            code="instance_lost",
        )
        event = style.write(style.error(error))
    body = event + style.last
    await send({"type": "http.response.body", "body": body, "more_body": False})


class _LoadCount:
    """Counts one request in the load of the instances it uses."""

    def __init__(self, route: RouteChoice) -> None:
        self._route = route
        self._outstanding = route.uncached_tokens

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A context in which the request is counted."""
        route = self._route
        entries = [entry for entry in (route.server, route.prefill) if entry is not None]
        for entry in entries:
            entry.num_alive += 1
        route.worker.outstanding_tokens += self._outstanding
        try:
            yield
        finally:
            for entry in entries:
                entry.num_alive -= 1
            self.prefilled()

    def prefilled(self) -> None:
        """Remove the request's prompt tokens from the outstanding work. Calling it twice is
        safe."""
        self._route.worker.outstanding_tokens -= self._outstanding
        self._outstanding = 0


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    pieces, num_bytes = [], 0
    async for piece in answer.content.iter_any():
        num_bytes += len(piece)
        if num_bytes > _MAX_ANSWER_BYTES:
            raise ValueError(
                f"a response is longer than the limit of {_MAX_ANSWER_BYTES} bytes"
            )
        pieces.append(piece)
    return b"".join(pieces)


def _headers(
    answer: aiohttp.ClientResponse, server: Instance
) -> tuple[tuple[bytes, bytes], ...]:
    """The headers passed back to the client, and the name of the instance."""
    found = [
        (name.encode(), answer.headers[name].encode("latin-1"))
        for name in _PASSED_BACK
        if name in answer.headers
    ]
    return (*found, (b"x-headwater-instance", server.name.encode()))


def _error_code(body: bytes) -> str | None:
    """The code of an OpenAI error object, or PEER_REFUSED when a prefill instance refused."""
    try:
        error = msgspec.json.decode(body, type=ErrorAnswer).error
    except msgspec.DecodeError:
        return None
    is_by_prefill = error.type == PEER_REFUSED and error.code != _NO_ROOM
    return PEER_REFUSED if is_by_prefill else str(error.code)


def _reason(exc: Exception) -> str:
    if isinstance(exc, aiohttp.ClientConnectorError):
        return "unreachable"
    if isinstance(exc, InstanceFailed):
        return "failed"
    return "lost" if isinstance(exc, TimeoutError) else "broken"
