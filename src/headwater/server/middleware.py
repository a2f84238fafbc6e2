"""ASGI middleware in front of the application: access checks, then readiness.

Plain ASGI, because every request passes through it.
"""

from contextlib import nullcontext

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.server.access import Access, AccessPolicy
from headwater.server.errors import RequestRefused, error_response

_ACCESS = "headwater.access"


class ReadinessMiddleware:
    """Answers 503 before `open` and after `shut`; in between it forwards to the application."""

    def __init__(self, policy: AccessPolicy) -> None:
        self._policy = policy
        self._app: ASGIApp | None = None
        self._reason = "the engine is starting; retry later"

    def open(self, app: ASGIApp) -> None:
        """Forward requests to `app` from now on."""
        self._app = app

    def shut(self, reason: str) -> None:
        """Refuse new requests with `reason`; running ones continue."""
        self._app = None
        self._reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            access = self._policy.check(scope)
            if self._app is None:
                raise RequestRefused(self._reason, status=503, code="not_ready")
            with nullcontext() if access.key is None else self._policy.keys.use(access.key):
                scope[_ACCESS] = access
                await self._app(scope, receive, send)
        except RequestRefused as refused:
            await error_response(refused)(scope, receive, send)


def access_of(request: Request) -> Access:
    """The result of the access check of a request."""
    access: Access = request.scope[_ACCESS]
    return access
