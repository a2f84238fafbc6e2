"""JSON bodies: requests are read with a size limit and a type, responses are written.

The size limit is checked before the body is read, and the type before any field is used.
"""

import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headwater.server.errors import RequestRefused
from headwater.server.schema import Sampling
from headwater.server.streaming import ClientDisconnected

if TYPE_CHECKING:
    from headwater.server.body_parser import BodyParser

S = TypeVar("S", bound=msgspec.Struct)

INLINE_BYTES = 512 * 1024
"""Bodies up to this length are parsed on the event loop, which takes milliseconds."""

_PIECE_BYTES = 256 * 1024

ASGIResponse: TypeAlias = Response | Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
"""What an endpoint returns: a whole response, or a function that sends one."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")

_encode = msgspec.json.Encoder().encode


class JsonResponse(Response):
    """A msgspec struct, or plain values, as JSON."""

    media_type = "application/json"

    def __init__(
        self, value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(_encode(value), status_code=status, headers=headers)


async def read_body(
    request: Request, kind: type[S], *, max_bytes: int, optional: bool = False
) -> S:
    """The body as `kind`. Raises RequestRefused with status 413 or 400.

    With `optional`, an empty body is `kind` with its defaults.
    """
    raw = await read_raw(request, max_bytes)
    if optional and not raw:
        return kind()
    if len(raw) <= INLINE_BYTES:
        return decode_json(raw, kind)
    parser: BodyParser = request.app.state.parser
    return await parser.parse(raw, kind)


def decode_json(raw: bytes, kind: type[S]) -> S:
    """A JSON body as `kind`. Raises RequestRefused that names the wrong field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as exc:
        sentence, param = _describe(str(exc))
        raise RequestRefused(sentence, param=param) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestRefused(f"the body is not JSON: {exc}") from exc
    except RecursionError as exc:
        raise RequestRefused("the body is nested too deeply") from exc


async def read_raw(request: Request, max_bytes: int) -> bytes:
    """The body as bytes. Raises RequestRefused with 413 before reading more than `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_long(max_bytes)
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async for piece in request.stream():
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise _too_long(max_bytes)
            pieces.append(piece)
    except ClientDisconnect as exc:
        raise ClientDisconnected from exc
    return b"".join(pieces)


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body in pieces. Written in one piece, 15 MB would be copied or encrypted at once, and
    other requests would wait meanwhile."""
    view = memoryview(body)
    for start in range(0, len(view), _PIECE_BYTES):
        yield bytes(view[start : start + _PIECE_BYTES])


def _too_long(max_bytes: int) -> RequestRefused:
    return RequestRefused(
        f"the body is longer than the limit of {max_bytes} bytes; send a shorter one or raise "
        "--max-body-mib",
        status=413,
    )


def traceparent(request: Request) -> str | None:
    """The caller's span from the W3C `traceparent` header; None when it is missing or invalid."""
    value = request.headers.get("traceparent", "")
    return value if _TRACEPARENT.fullmatch(value) else None


def request_id_of(request: Request, body: Sampling) -> str:
    """The request id the client gave in the body or in `X-Request-Id`, or a new one."""
    name = body.request_id or request.headers.get("x-request-id")
    if name is None:
        return secrets.token_hex(12)
    if not _REQUEST_ID.fullmatch(name):
        raise RequestRefused(
            f"a request id has 1 to 256 printable ASCII characters without spaces, "
            f"got {len(name)} characters",
            param="request_id",
        )
    return name


def _describe(message: str) -> tuple[str, str | None]:
    """Split msgspec's "… - at `$.field`" into a sentence and the field name."""
    sentence, found, path = message.partition(" - at `$.")
    if not found:
        missing = re.search(r"missing required field `(\w+)`", message)
        return message, missing.group(1) if missing else None
    param = re.split(r"[.\[]", path.rstrip("`"), maxsplit=1)[0]
    return f"{param}: {sentence}", param
