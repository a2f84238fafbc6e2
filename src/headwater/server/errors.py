"""Our errors as HTTP answers: a status, and OpenAI's error object.

400  the request is wrong            429  as many wait as may wait
401  the key is missing or wrong     499  aborted before it was done
404  no such model or path           503  starting, stopping, or the engine is dead
413  the body is too long
"""

import msgspec
from starlette.responses import Response

from headwater.errors import (
    EngineDead,
    HeadwaterError,
    PeerRefused,
    PromptTooLong,
    QueueFull,
    RequestError,
)

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "request_aborted",
    503: "service_unavailable",
}

RETRY_AFTER_S = 1


class RequestRefused(RequestError):
    """A request the server itself turns down, with the field or the status that says why."""

    def __init__(
        self,
        sentence: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
    ) -> None:
        super().__init__(sentence)
        self.param = param
        self.status = status
        self.code = code


class ErrorObject(msgspec.Struct, kw_only=True):
    """What OpenAI's clients show their user."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorObject


def status_of(error: HeadwaterError) -> int:
    """The status that says whose fault it was."""
    match error:
        case RequestRefused():
            return error.status
        case QueueFull():
            return 429
        case RequestError():
            return 400
        case _:
            return 503


def error_answer(error: HeadwaterError) -> ErrorAnswer:
    """The error object; what the message says is for the client to read."""
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
    """The whole answer, with `Retry-After` where trying again makes sense."""
    status = status_of(error)
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 429 else None
    if status == 503 and not isinstance(error, EngineDead):
        headers = {"retry-after": str(RETRY_AFTER_S)}
    if status == 401:
        headers = {"www-authenticate": "Bearer"}
    return Response(
        msgspec.json.encode(body or error_answer(error)),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


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
        case EngineDead():
            return "engine_dead"
        case _:
            return None
