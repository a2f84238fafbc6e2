"""What stands before the application: 503 until it is ready, and the key.

Plain ASGI, because it is passed for every request.
"""

import hmac
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.server import dashboard
from headwater.server.errors import RequestRefused, error_response


def is_health(scope: Scope) -> bool:
    """Needs no key: load balancers ask it."""
    return bool(scope["path"] == "/health")


def is_public(scope: Scope) -> bool:
    """Needs no key: health, and the files of the page, which asks for the key itself."""
    path: str = scope["path"]
    return is_health(scope) or path == dashboard.PATH or path.startswith(dashboard.PATH + "/")


class ReadinessMiddleware:
    """Answers 503 before `open` and after `shut`, in between passes requests on."""

    def __init__(
        self, api_key: str | None = None, *, is_open: Callable[[Scope], bool] = is_public
    ) -> None:
        """`is_open` says which requests need no key."""
        self._is_open = is_open
        self._key = None if api_key is None else api_key.encode()
        self._app: ASGIApp | None = None
        self._reason = "the engine is starting"

    def open(self, app: ASGIApp) -> None:
        """From now on `app` answers."""
        self._app = app

    def shut(self, reason: str) -> None:
        """From now on new requests are told to go elsewhere; those inside go on."""
        self._app = None
        self._reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._key is not None and not self._is_open(scope) and not self._fits(scope):
            refused = RequestRefused(
                "a valid API key is needed", status=401, code="invalid_api_key"
            )
            await error_response(refused)(scope, receive, send)
        elif self._app is None:
            refused = RequestRefused(self._reason, status=503, code="not_ready")
            await error_response(refused)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _fits(self, scope: Scope) -> bool:
        """Whether the request carries our key; takes as long for a near miss as for any other."""
        assert self._key is not None, "asked only where there is a key"
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")  # as Anthropic's clients send it
        return hmac.compare_digest(key.strip(), self._key)
