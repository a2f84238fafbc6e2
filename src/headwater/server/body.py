"""Reading a request: its body, bounded and typed, and the name its client gave it."""

import re
import secrets
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from headwater.server.errors import RequestRefused
from headwater.server.schema import Sampling
from headwater.server.streaming import ClientDisconnected

S = TypeVar("S", bound=msgspec.Struct)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_NAME = re.compile(r"[\x21-\x7e]{1,256}")


async def read_body(
    request: Request, kind: type[S], *, max_bytes: int, optional: bool = False
) -> S:
    """The body as `kind`. Raises Refused with 413 or 400, before reading more than is allowed.

    Where it is `optional`, no body is one that says nothing.
    """
    raw = await read_raw(request, max_bytes)
    if optional and not raw:
        return kind()
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as exc:
        sentence, param = _describe(str(exc))
        raise RequestRefused(sentence, param=param) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestRefused(f"the body is not JSON: {exc}") from exc
    except RecursionError as exc:
        raise RequestRefused("the body is nested too deeply") from exc


def traceparent(request: Request) -> str | None:
    """The span of the caller, as W3C's header names it; anything else is ignored."""
    named = request.headers.get("traceparent", "")
    return named if _TRACEPARENT.fullmatch(named) else None


def request_name(request: Request, body: Sampling) -> str:
    """What the client calls this request, or a fresh name."""
    name = body.request_id or request.headers.get("x-request-id")
    if name is None:
        return secrets.token_hex(12)
    if not _NAME.fullmatch(name):
        raise RequestRefused(
            "a request id is 1 to 256 printable ASCII characters without spaces",
            param="request_id",
        )
    return name


async def read_raw(request: Request, max_bytes: int) -> bytes:
    """The body as it came. Raises Refused with 413, before reading more than is allowed."""
    too_long = RequestRefused(f"the body is longer than {max_bytes} bytes", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_long
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async for piece in request.stream():
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise too_long
            pieces.append(piece)
    except ClientDisconnect as exc:
        raise ClientDisconnected from exc
    return b"".join(pieces)


def _describe(message: str) -> tuple[str, str | None]:
    """Split msgspec's "… - at `$.field`" into a sentence and the field."""
    sentence, found, path = message.partition(" - at `$.")
    if not found:
        missing = re.search(r"missing required field `(\w+)`", message)
        return message, missing.group(1) if missing else None
    param = re.split(r"[.\[]", path.rstrip("`"), maxsplit=1)[0]
    return f"{param}: {sentence}", param
