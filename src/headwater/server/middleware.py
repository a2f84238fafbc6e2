"""ASGI middleware in front of the application: access checks, then readiness.

Plain ASGI, because every request passes through it.
"""

import asyncio
from contextlib import nullcontext

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.server.access import Access, AccessPolicy
from headwater.server.errors import RequestRefused, error_response

_ACCESS = "headwater.access"
_HEALTH_PATHS = ("/health", "/health_generate")
_PATHS_WHILE_DRAINING = ("/instances", "/v1/abort_requests")


class ReadinessMiddleware:
    """Answers 503 before `open`, forwards to the application after it, and refuses new work
    after `drain` while running requests finish."""

    def __init__(self, policy: AccessPolicy) -> None:
        self._policy = policy
        self._app: ASGIApp | None = None
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0
        """Requests inside the application."""

    def open(self, app: ASGIApp) -> None:
        """Forward requests to `app` from now on."""
        self._app = app

    def drain(self) -> None:
        """Refuse new work from now on. Reads, such as /metrics, are still answered."""
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; False when some still run after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            access = self._policy.check(scope)
            app = self._check_open(scope)
            key = access.key
            limits = nullcontext() if key is None else self._policy.limits.use(key)
            async with limits:
                scope[_ACCESS] = access
                await self._run(app, scope, receive, send)
        except RequestRefused as refused:
            response = error_response(refused)
            if self._is_draining:
                response.headers["connection"] = "close"  # the next one goes to another server
            await response(scope, receive, send)

    def _check_open(self, scope: Scope) -> ASGIApp:
        if self._is_draining and _is_new_work(scope):
            raise RequestRefused(
                "draining: the server is stopping; retry on another one",
                status=503,
                code="draining",
            )
        if self._app is None:
            raise RequestRefused(
                "the engine is starting; retry later", status=503, code="not_ready"
            )
        return self._app

    async def _run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_running += 1
        self._idle.clear()
        try:
            await app(scope, receive, send)
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()


def _is_new_work(scope: Scope) -> bool:
    """Whether a draining server refuses this request. Instances still send heartbeats to a
    draining router, because its running streams need them."""
    path: str = scope["path"]
    if path in _HEALTH_PATHS:
        return True
    return scope["method"] == "POST" and path not in _PATHS_WHILE_DRAINING


def access_of(request: Request) -> Access:
    """The result of the access check of a request."""
    access: Access = request.scope[_ACCESS]
    return access
