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
from headwater.metrics import router_names
from headwater.server.access import encode_caller
from headwater.server.body import ASGIResponse, read_raw
from headwater.server.cluster_auth import ClusterAuth
from headwater.server.continuation import HEADER as CONTINUABLE_HEADER
from headwater.server.errors import RequestRefused, error_response
from headwater.server.messages import MESSAGES_EVENTS
from headwater.server.middleware import access_of
from headwater.server.responses import RESPONSES_EVENTS
from headwater.server.router.attempts import Attempts, RetryBudget
from headwater.server.router.config import RouterConfig
from headwater.server.router.instance import Instance
from headwater.server.router.metrics import RouterRecorder
from headwater.server.router.prompt_fields import GENERATING, PromptFields
from headwater.server.router.prompts import PromptPaths, PromptReader, stored_response
from headwater.server.router.protocol import (
    CALLER_HEADER,
    FALLBACK_HEADER,
    PREFILL_HEADER,
    ModelGroup,
)
from headwater.server.router.registry import SERVING, Registry
from headwater.server.router.route_selector import RouteChoice, RouteSelector
from headwater.server.router.stream_progress import StreamProgress
from headwater.server.router.upstream import (
    Attempt,
    AttemptFailure,
    ForwardedRequest,
    end_stream,
)
from headwater.server.streaming import OPENAI_EVENTS, ClientDisconnected, while_connected

_PASSED_ON = (
    "content-type",
    "x-request-id",
    "user-agent",
    "accept",
)
_STYLES = {"/v1/messages": MESSAGES_EVENTS, "/v1/responses": RESPONSES_EVENTS}
_KEYS = ("authorization", "x-api-key")
"""Where clients of OpenAI and of Anthropic put their key."""


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
                self._recorder.count(router_names.ROUTER_REQUESTS, "abort")
            finally:
                self.num_requests -= 1

        return answer

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        self._budget.deposit()
        ready = self._registry.ready(SERVING)
        fields = await self._prompts.fields(request.url.path, body, ready)
        owner = self._owner(request, fields)
        paths = await self._paths(request, fields)
        attempts = Attempts(self._config.max_attempts, self._budget)
        progress = StreamProgress(_STYLES.get(request.url.path, OPENAI_EVENTS))
        failure: AttemptFailure | None = None
        begun_in: ModelGroup | None = None
        # All attempts share one request id, so that all parts of the response have it.
        name = secrets.token_hex(12)
        while attempts.may_continue(progress):
            route = self._choose(paths, attempts, owner, begun_in)
            if route is None:
                break
            forwarded = self._forwarded(route, request, progress.body(body), name)
            attempt = Attempt(self._session, self._clock, route, send, progress)
            failure = await attempt.run(forwarded)
            if failure is None:
                self._succeeded(route)
                return
            if progress.has_begun:
                begun_in = route.server.group
            self._recorder.count(
                router_names.ROUTER_FAILURES, route.server.name, failure.reason
            )
            attempts.record_failure(route, failure, progress)
        await self._give_up(failure, progress, send)

    def _choose(
        self,
        paths: PromptPaths,
        attempts: Attempts,
        owner: Instance | None,
        group: ModelGroup | None,
    ) -> RouteChoice | None:
        """Prefer instances not tried yet; otherwise retry one that was full. A stream that has
        begun stays in its `group`: other weights would continue it with another text."""
        choose = self._selector.choose
        full = attempts.tried - attempts.returned
        route = choose(paths, attempts.tried, owner=owner, group=group)
        return route or choose(paths, full, owner=owner, group=group)

    def _owner(self, request: Request, fields: PromptFields) -> Instance | None:
        """The instance that has the stored response which a request names; None without one.

        Raises RequestRefused when no registered instance has it.
        """
        response_id = stored_response(request.url.path, fields)
        if response_id is None:
            return None
        server_id = response_id.removeprefix("resp_").rpartition("_")[0]
        owner = self._registry.of_server(server_id)
        if owner is None and self._registry.is_away(server_id):
            raise RequestRefused(
                f"the instance that has the response {response_id[:140]!r} does not answer; its "
                "engine may be restarting. Retry later, or send the whole conversation",
                param="previous_response_id",
                status=503,
                code="instance_lost",
            )
        if owner is None:
            raise RequestRefused(
                f"the response {response_id[:140]!r} is not stored on any instance: its lifetime "
                "is over, or its instance was stopped. Send the whole conversation",
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

    async def _paths(self, request: Request, fields: PromptFields) -> PromptPaths:
        """The prompt's block hashes in each group, when they matter for routing."""
        if request.url.path not in GENERATING:
            return PromptPaths()
        asked: dict[ModelGroup, Instance] = {}
        for entry in sorted(self._registry.ready(SERVING), key=lambda entry: entry.num_alive):
            asked.setdefault(entry.group, entry)
        return await self._prompts.paths(fields, request, list(asked.values()))

    def _succeeded(self, route: RouteChoice) -> None:
        record, group = self._recorder.count, route.server.group.label
        record(router_names.ROUTER_REQUESTS, "answered")
        record(router_names.ROUTER_ROUTED, route.server.name, route.worker.trust.value)
        record(router_names.ROUTER_PROMPT_TOKENS, group, amount=route.prompt_tokens)
        record(router_names.ROUTER_CACHED_TOKENS, group, amount=route.cached_tokens)
        if route.prefill is not None:
            record(router_names.ROUTER_PREFILLS, route.prefill.name, route.server.name)

    async def _give_up(
        self, failure: AttemptFailure | None, progress: StreamProgress, send: Send
    ) -> None:
        self._recorder.count(router_names.ROUTER_REQUESTS, "failed")
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
        raise RequestRefused("the path has a '..' segment; send a path without one", status=404)
    return path
