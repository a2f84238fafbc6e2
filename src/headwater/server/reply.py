"""Answers that are sent in one piece."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Reply: TypeAlias = Response | Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
"""What an endpoint returns: a whole response, or something that sends one itself."""

_encode = msgspec.json.Encoder().encode


class JsonReply(Response):
    """A msgspec struct, or plain values, as JSON."""

    media_type = "application/json"

    def __init__(
        self, value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(_encode(value), status_code=status, headers=headers)
