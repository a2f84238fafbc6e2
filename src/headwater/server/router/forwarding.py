"""Forwards one client request: read, route, and try instances until one answers.

A request is retried while the client has received nothing, or when its stream can be continued
on another instance. Retries are limited by a budget, so that an outage does not add load.
"""

import secrets
from urllib.parse import unquote

import aiohttp
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from headwater.clock import Clock
from headwater.errors import HeadwaterError, QueueFull
from headwater.metrics import names
from headwater.server.access import encode_caller
from headwater.server.body import ASGIResponse, read_raw
from headwater.server.cluster_auth import ClusterAuth
from headwater.server.continuation import HEADER as CONTINUABLE_HEADER
from headwater.server.errors import RequestRefused, error_response
from headwater.server.middleware import access_of
from headwater.server.router.attempts import Attempts, RetryBudget
from headwater.server.router.config import RouterConfig
from headwater.server.router.instance import Instance
from headwater.server.router.metrics import RouterRecorder
from headwater.server.router.prompts import (
    UNKNOWN,
    PromptPath,
    PromptReader,
    stored_response,
)
from headwater.server.router.protocol import CALLER_HEADER, FALLBACK_HEADER, PREFILL_HEADER
from headwater.server.router.registry import SERVING, Registry
from headwater.server.router.route_selector import RouteChoice, RouteSelector
from headwater.server.router.stream_progress import StreamProgress
from headwater.server.router.upstream import (
    Attempt,
    AttemptFailure,
    ForwardedRequest,
    end_stream,
)
from headwater.server.streaming import ClientDisconnected, while_connected

_PASSED_ON = (
    "content-type",
    "x-request-id",
    "user-agent",
    "accept",
)
_KEYS = ("authorization", "x-api-key")
"""Where clients of OpenAI and of Anthropic put their key."""

_GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}
)


class Forwarder:
    """Forwards requests to instances."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        registry: Registry,
        prompts: PromptReader,
        session: aiohttp.ClientSession,
        recorder: RouterRecorder,
        cluster: ClusterAuth,
    ) -> None:
        self._config = config
        self._clock = clock
        self._registry = registry
        self._prompts = prompts
        self._session = session
        self._recorder = recorder
        self._cluster = cluster
        self._selector = RouteSelector(config, registry, clock)
        self._budget = RetryBudget(config.retry_share)
        self.num_requests = 0

    async def forward(self, request: Request) -> ASGIResponse:
        """The endpoint: passes the response on as it arrives."""
        if self.num_requests >= self._config.max_requests:
            raise QueueFull(
                f"{self.num_requests} requests are in flight, the limit is "
                f"{self._config.max_requests}; retry later"
            )
        self.num_requests += 1
        try:
            body = await read_raw(request, self._config.max_body_bytes)
        except BaseException:
            self.num_requests -= 1
            raise

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await while_connected(receive, self._answer(request, body, send))
            except HeadwaterError as error:
                await error_response(error)(scope, receive, send)
            except ClientDisconnected:
                self._recorder.count(names.ROUTER_REQUESTS, "abort")
            finally:
                self.num_requests -= 1

        return answer

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        self._budget.deposit()
        owner = self._owner(request, body)
        path = await self._read(request, body)
        attempts, progress = Attempts(self._config.max_attempts, self._budget), StreamProgress()
        failure: AttemptFailure | None = None
        # All attempts share one request id, so that all parts of the response have it.
        name = secrets.token_hex(12)
        while attempts.may_continue(progress):
            route = self._choose(path, attempts, owner)
            if route is None:
                break
            forwarded = self._forwarded(route, request, progress.body(body), name)
            attempt = Attempt(self._session, self._clock, route, send, progress)
            failure = await attempt.run(forwarded)
            if failure is None:
                self._succeeded(path, route)
                return
            self._recorder.count(names.ROUTER_FAILURES, route.server.name, failure.reason)
            attempts.record_failure(route, failure, progress)
        await self._give_up(failure, progress, send)

    def _choose(
        self, path: PromptPath, attempts: Attempts, owner: Instance | None
    ) -> RouteChoice | None:
        """Prefer instances not tried yet; otherwise retry one that was full."""
        route = self._selector.choose(path, attempts.tried, owner=owner)
        full = attempts.tried - attempts.returned
        return route or self._selector.choose(path, full, owner=owner)

    def _owner(self, request: Request, body: bytes) -> Instance | None:
        """The instance that has the stored response which a request names; None without one.

        Raises RequestRefused when no registered instance has it.
        """
        response_id = stored_response(request.url.path, body)
        if response_id is None:
            return None
        epoch = response_id.removeprefix("resp_").rpartition("_")[0]
        owner = self._registry.of_epoch(epoch)
        if owner is None:
            raise RequestRefused(
                f"the response {response_id[:140]!r} is not stored on any instance: its time is "
                "over, or its instance was stopped",
                param="previous_response_id",
                status=404,
                code="previous_response_not_found",
            )
        return owner

    def _forwarded(
        self, route: RouteChoice, request: Request, body: bytes, name: str
    ) -> ForwardedRequest:
        """The request for `route`. Headwater's own headers are never taken from the client."""
        passed = {key: request.headers[key] for key in _PASSED_ON if key in request.headers}
        headers = {"x-request-id": name, **passed, CONTINUABLE_HEADER: "1"}
        headers[CALLER_HEADER] = encode_caller(access_of(request).caller)
        if route.prefill is not None:
            headers[PREFILL_HEADER] = route.prefill.registration.peer_address
            if route.is_last_prefill:
                headers[FALLBACK_HEADER] = "local"
        if not self._cluster.has_token:
            # Without a peer token (--insecure) instances check the client's own key.
            headers |= {key: request.headers[key] for key in _KEYS if key in request.headers}
        path = _raw_path(request)
        headers = self._cluster.sign(request.method, path, headers)
        query = request.scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        return ForwardedRequest(method=request.method, path=target, headers=headers, body=body)

    async def _read(self, request: Request, body: bytes) -> PromptPath:
        """The prompt's block hashes, when they matter for routing."""
        scheme, ready = self._registry.scheme, self._registry.ready(SERVING)
        if scheme is None or not ready or request.url.path not in _GENERATING:
            return UNKNOWN
        asked = min(ready, key=lambda entry: entry.num_alive)
        return await self._prompts.read(body, request, scheme, asked)

    def _succeeded(self, path: PromptPath, route: RouteChoice) -> None:
        record = self._recorder.count
        record(names.ROUTER_REQUESTS, "answered")
        record(names.ROUTER_ROUTED, route.server.name, route.worker.trust.value)
        record(names.ROUTER_PROMPT_TOKENS, amount=path.num_tokens)
        record(names.ROUTER_CACHED_TOKENS, amount=route.cached_tokens)

    async def _give_up(
        self, failure: AttemptFailure | None, progress: StreamProgress, send: Send
    ) -> None:
        self._recorder.count(names.ROUTER_REQUESTS, "failed")
        if failure is None:
            raise RequestRefused(
                "no instance is ready; check GET /instances on the router",
                status=503,
                code="no_instance",
            )
        if progress.has_begun:
            await end_stream(send, progress)
        elif failure.body:
            size = (b"content-length", str(len(failure.body)).encode())
            start = {"status": failure.status, "headers": [*failure.headers, size]}
            await send({"type": "http.response.start", **start})
            await send({"type": "http.response.body", "body": failure.body})
        else:
            raise RequestRefused(
                f"all attempts failed, the last one with {failure.reason!r}; retry later",
                status=503,
                code="instances_failed",
            )


def _raw_path(request: Request) -> str:
    """The path exactly as the client sent it, without the query. It is not decoded and encoded
    again, so the instance matches the same route as this router did."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    path = raw.partition(b"?")[0].decode("latin-1")
    if any(unquote(segment) in (".", "..") for segment in path.split("/")) or ".." in unquote(
        path
    ).split("/"):
        raise RequestRefused("the path has a '..' segment", status=404)
    return path
