"""One attempt at one instance: send the request on, pass the answer back as it comes.

Nothing reaches the client before there is something whole to send, so an attempt that fails
before its first event can be made again elsewhere, and nobody notices; one that fails later can
go on elsewhere, where `StreamProgress` says so.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
import msgspec
from starlette.types import Send

from headwater.clock import Clock
from headwater.server.errors import ErrorAnswer, ErrorObject
from headwater.server.router.choice import RouteChoice
from headwater.server.router.events import EventSplitter
from headwater.server.router.instance import Instance
from headwater.server.router.progress import InstanceFailed, Returned, StreamProgress

RETURNED = "returned"
"""Why an attempt ended whose instance has no room to go on; it has not failed."""

PEER_REFUSED = "peer_refused"
"""Why an attempt ended whose prefill instance did not take it, for whatever reason."""

_NO_ROOM = "no_room"
"""What a decode instance says of itself, when a prefill instance would have had a prompt for it."""

_DONE = b"data: [DONE]\n\n"
_PASSED_BACK = (
    "content-type",
    "cache-control",
    "retry-after",
    "www-authenticate",
    "x-request-id",
)
_TRY_ELSEWHERE = frozenset({429, 503})
_CANNOT_SERVE = frozenset({"engine_dead", "not_ready"})
_MAX_ANSWER_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """An attempt that did not give the client all of an answer."""

    reason: str
    """One word, for counting."""

    status: int = 502
    body: bytes = b""
    """What the instance answered, where it answered."""

    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request as it goes to an instance."""

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
        """`progress` is how far the answer got in attempts before this one."""
        self._session = session
        self._clock = clock
        self._route = route
        self._send = send
        self._progress = progress
        self._seat = _Seat(route)

    async def run(self, sent: Sent) -> AttemptFailure | None:
        """None once the client has the whole answer. Cancelling ends it at the instance too."""
        server = self._route.server
        route, now = self._route, self._clock.now()
        route.worker.recent.add(route.uncached_tokens, now=now)
        if route.prefill is not None:
            server.recent.add(route.moved_tokens, now=now)
        try:
            with self._seat.taken():
                async with (
                    _ended_with(server),
                    self._session.request(
                        sent.method,
                        server.told.url + sent.path,
                        data=sent.body,
                        headers=sent.headers,
                    ) as answer,
                ):
                    return await self._pass_back(answer)
        except Returned:
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
        await self._send({"type": "http.response.body", "body": body})
        return None

    async def _stream(self, answer: aiohttp.ClientResponse) -> AttemptFailure | None:
        """Events as they come, whole ones only; a stream that just stops is a failure."""
        splitter, is_last = EventSplitter(), False
        async for piece in answer.content.iter_any():
            whole = splitter.feed(piece)
            events = self._progress.strip(whole) if whole else b""
            if not events:
                continue
            self._seat.computed()
            if not self._progress.has_begun:
                await self._begin(200, _headers(answer, self._route.server))
            is_last = events.endswith(_DONE)
            await self._send(
                {"type": "http.response.body", "body": events, "more_body": not is_last}
            )
        if is_last:
            return None
        self._route.server.has_failed = True
        return AttemptFailure(reason="broken_stream")

    async def _begin(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self._progress.has_begun = True
        await self._send(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )


async def end_stream(send: Send, progress: StreamProgress) -> None:
    """End a stream that broke: its client is told, unless only the end was missing."""
    error = ErrorObject(
        message="the instance that generated this was lost",
        type="server_error",
        code="instance_lost",
    )
    event = b"data: " + msgspec.json.encode(ErrorAnswer(error=error)) + b"\n\n"
    if progress.is_whole:
        event = b""
    await send({"type": "http.response.body", "body": event + _DONE, "more_body": False})


class _Seat:
    """A request's place in the books of the instances it uses."""

    def __init__(self, route: RouteChoice) -> None:
        self._route = route
        self._outstanding = route.uncached_tokens

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Counted while the block lasts."""
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
            self.computed()

    def computed(self) -> None:
        """The prompt is done; once is enough."""
        self._route.worker.outstanding_tokens -= self._outstanding
        self._outstanding = 0


@asynccontextmanager
async def _ended_with(instance: Instance) -> AsyncIterator[None]:
    """Ends the block with TimeoutError when the instance is lost."""
    async with asyncio.timeout(None) as scope:
        instance.scopes.add(scope)
        try:
            yield
        finally:
            instance.scopes.discard(scope)


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    pieces, num_bytes = [], 0
    async for piece in answer.content.iter_any():
        num_bytes += len(piece)
        if num_bytes > _MAX_ANSWER_BYTES:
            raise ValueError("an answer is longer than any that is served")
        pieces.append(piece)
    return b"".join(pieces)


def _headers(
    answer: aiohttp.ClientResponse, server: Instance
) -> tuple[tuple[bytes, bytes], ...]:
    """What the client gets to see of the instance's headers, and which instance it was."""
    found = [
        (name.encode(), answer.headers[name].encode("latin-1"))
        for name in _PASSED_BACK
        if name in answer.headers
    ]
    return (*found, (b"x-headwater-instance", server.name.encode()))


def _error_code(body: bytes) -> str | None:
    """The code of an OpenAI error object, where there is one; of a refusal, whose it is."""
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
