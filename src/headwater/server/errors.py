"""Errors as HTTP responses: a status and the OpenAI error object.

400  invalid request                       415  a control body that is not application/json
401  API key missing or wrong              421  the Host header names another server
403  key without the scope, wrong peer     429  queue full, or over a limit of the key
404  no such model or path                 499  aborted before it was complete
413  body over the size limit              503  starting, stopping, or no engine
"""

import math

import msgspec
from starlette.responses import Response

from headwater.errors import (
    EngineDead,
    EngineRestarting,
    HeadwaterError,
    NotDrained,
    PeerRefused,
    PromptTooLong,
    QueueFull,
    RequestError,
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "request_aborted",
    503: "service_unavailable",
}

_RETRY_AFTER_S = 1


class RequestRefused(RequestError):
    """A request that the HTTP server refuses, with the field or the status that explains it."""

    def __init__(
        self,
        sentence: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(sentence)
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class ErrorObject(msgspec.Struct, kw_only=True):
    """The OpenAI error object."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of every error response."""

    error: ErrorObject


def status_of(error: HeadwaterError) -> int:
    """The HTTP status of an error."""
    match error:
        case RequestRefused():
            return error.status
        case QueueFull():
            return 429
        case NotDrained():
            return 503
        case RequestError():
            return 400
        case _:
            return 503


def error_answer(error: HeadwaterError) -> ErrorAnswer:
    """The body of the error response."""
    status = status_of(error)
    param = error.param if isinstance(error, RequestRefused) else None
    return ErrorAnswer(
        error=ErrorObject(
            message=str(error),
            type=_type_of(error, status),
            param=param,
            code=_code_of(error),
        )
    )


def error_response(error: HeadwaterError, body: msgspec.Struct | None = None) -> Response:
    """The error response, with `Retry-After` when a retry can succeed."""
    status = status_of(error)
    headers = None
    if status == 429 or (status == 503 and not _is_final(error)):
        given: float | None = getattr(error, "retry_after_s", None)
        headers = {"retry-after": str(math.ceil(given or _RETRY_AFTER_S))}
    if status == 401:
        headers = {"www-authenticate": "Bearer"}
    return Response(
        msgspec.json.encode(body or error_answer(error)),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def _is_final(error: HeadwaterError) -> bool:
    """Whether a retry on this server cannot succeed."""
    return isinstance(error, EngineDead) and not isinstance(error, EngineRestarting)


def _type_of(error: HeadwaterError, status: int) -> str:
    if isinstance(error, PeerRefused):
        return "peer_refused"
    return _TYPES.get(status, "invalid_request_error")


def _code_of(error: HeadwaterError) -> str | None:
    match error:
        case PeerRefused():
            return error.reason
        case RequestRefused():
            return error.code
        case PromptTooLong():
            return "context_length_exceeded"
        case QueueFull():
            return "queue_full"
        case NotDrained():
            return "not_drained"
        case EngineRestarting():
            return "engine_restarting"
        case EngineDead():
            return "engine_dead"
        case _:
            return None
