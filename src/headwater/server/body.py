"""JSON bodies: reads requests with a size limit and a type, and writes responses.

The size limit is checked before the body is read, and the type before any field is used.
"""

import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct
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

_INLINE_CONTAINERS = 20_000
"""Maximum number of brackets of a body that is parsed on the event loop. Many small lists take
long to parse, because the cycle collector runs again and again while they are created."""

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
    request.state.num_body_bytes = len(raw)
    if optional and not raw:
        return kind()
    if is_short(raw):
        return decode_json(raw, kind)
    parser: BodyParser = request.app.state.parser
    return await parser.parse(raw, kind)


def is_short(raw: bytes) -> bool:
    """Whether a body may be parsed on the event loop."""
    return len(raw) <= INLINE_BYTES and raw.count(b"[") + raw.count(b"{") <= _INLINE_CONTAINERS


def body_size(request: Request) -> int:
    """Bytes of a body that was read with `read_body`."""
    num_bytes: int = request.state.num_body_bytes
    return num_bytes


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
        raise RequestRefused("the body is nested too deeply; send a flatter one") from exc


async def read_raw(request: Request, max_bytes: int) -> bytes:
    """The body as bytes. Raises RequestRefused with 413 before reading more than `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
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


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, [], ""),
    "bad_words_token_ids": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "custom_logit_processor": (None, ""),
    "custom_params": (None, {}),
    "documents": (None, []),
    "early_stopping": (None, False),
    "ebnf": (None, ""),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_json_object": (None, False),
    "guided_whitespace_pattern": (None, ""),
    "json_schema": (None, ""),
    "kv_transfer_params": (None, {}),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "lora_path": (None, ""),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "no_stop_trim": (None, False),
    "prediction": (None,),
    "prompt_embeds": (None, []),
    "reasoning_max_tokens": (None,),
    "regex": (None, ""),
    "return_hidden_states": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "stop_regex": (None, [], ""),
    "structural_tag": (None, ""),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "top_a": (None, 0, 0.0),
    "truncate_prompt_tokens": (None,),
    "typical_p": (None, 1, 1.0),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "web_search_options": (None,),
}
"""Fields of the OpenAI API and of other servers that this server knows but does not support,
each with the values that have no effect. These values are accepted; any other value is a 400
that names the field, because ignoring it would return something other than the client
requested."""


_INSTEAD = {
    "ebnf": "send structured_outputs with a grammar",
    "regex": "send structured_outputs with a regex",
    "json_schema": "send response_format with a json_schema",
    "guided_json_object": 'send response_format {"type": "json_object"}',
    "functions": "send tools",
    "function_call": "send tool_choice",
    "truncate_prompt_tokens": "shorten the prompt instead",
    "best_of": "send n, whose answers are all returned",
    "use_beam_search": "send n; each answer is sampled on its own",
}
"""What to send for the same effect."""


def check_supported(body: Struct) -> None:
    """Raise RequestRefused for the first unsupported field that is set."""
    for name in body.__struct_fields__:
        neutral = NEUTRAL.get(name)
        if neutral is not None and not _is_neutral(getattr(body, name), neutral):
            advice = _INSTEAD.get(name, "leave it out")
            raise RequestRefused(
                f"{name!r} is not supported by this server; {advice}", param=name
            )


def _is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    # Types are compared too: 0 == False in Python, but not in JSON.
    return any(type(value) is type(other) and value == other for other in neutral)
