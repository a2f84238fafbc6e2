"""Control of a running server: pause, resume, abort, reset, close a session, reload weights.

Each verb is one entry of `CONTROL_VERBS`. Routes and the OpenAPI document are made from that
table, so adding a verb to the server takes one entry and one function.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headwater.engine.client import (
    MEMORY,
    CloseSession,
    Pause,
    ReloadWeights,
    ResetCache,
    Resume,
)
from headwater.server.body import JsonResponse
from headwater.server.control_body import read_control_body
from headwater.server.errors import RequestRefused
from headwater.server.keys import Caller
from headwater.server.middleware import access_of
from headwater.server.schema import SESSION_ID, Salt
from headwater.server.service import Service
from headwater.server.shared_state import AbortScope


class NoFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """A body without fields; it may be empty."""


class CloseSessionRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /cache/sessions/{session_id}; it may be empty."""

    cache_salt: Salt | None = None


class ResetRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /reset_prefix_cache; an empty one resets the device and host tiers."""

    tiers: Annotated[list[Literal["device", "host", "storage"]], Meta(min_length=1)] | None = (
        None
    )


class AbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/abort_requests: some requests, or all of them."""

    request_ids: list[str] | None = None
    abort_all: bool | None = None


class ReloadRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/reload_weights."""

    model: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """A folder beside the one given at start; null reads the same folder again."""

    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] | None = None
    """Longest wait for running requests; null means the server's `--drain-timeout`."""


class ControlDone(Struct, kw_only=True):
    """Body of the response of a verb without a result."""

    status: Literal["done"] = "done"


class SessionClosed(Struct, kw_only=True):
    """Response of POST /cache/sessions/{session_id}."""

    known: bool
    """Whether the session existed; otherwise there was nothing to do."""


class ResetAnswer(Struct, kw_only=True):
    """Response of POST /reset_prefix_cache: blocks by tier."""

    removed: dict[str, int]
    kept: dict[str, int]
    """Blocks in use. They are removed when their last user ends, except when a single tier was
    reset; then they stay."""

    status: Literal["done"] = "done"


class Aborted(Struct, kw_only=True):
    """Response of POST /v1/abort_requests."""

    aborted: int


class ReloadAnswer(Struct, kw_only=True):
    """Response of POST /v1/reload_weights."""

    fingerprint: str
    changed: bool
    """Whether the weights differ from those before; if so, the cache is empty now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest:
    """One request for a verb: the caller and the parameters of the path."""

    service: Service
    caller: Caller
    params: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlVerb:
    """One operation: its path, its body and its response."""

    paths: tuple[str, ...]
    summary: str
    run: Callable[["ControlRequest", Any], Awaitable[Struct]]
    """Executes the verb; called with the request and its body."""

    body: type[Struct] = NoFields
    answer: type[Struct] = ControlDone
    needs_body: bool = False

    def routes(self) -> list[Route]:
        """One route for each path."""
        return [Route(path, self._endpoint, methods=["POST"]) for path in self.paths]

    async def _endpoint(self, request: Request) -> Response:
        service: Service = request.app.state.service
        body = await read_control_body(
            request,
            self.body,
            max_bytes=service.config.limits.max_body_bytes,
            optional=not self.needs_body,
        )
        call = ControlRequest(
            service=service, caller=access_of(request).caller, params=request.path_params
        )
        return JsonResponse(await self.run(call, body))


async def _reset(call: ControlRequest, body: ResetRequest) -> ResetAnswer:
    report = await call.service.engine.control(ResetCache(frozenset(body.tiers or MEMORY)))
    return ResetAnswer(removed=report.removed, kept=report.kept)


async def _close_session(call: ControlRequest, body: CloseSessionRequest) -> SessionClosed:
    name = call.params["session_id"]
    if not re.match(SESSION_ID, name):
        raise RequestRefused(
            f"a session id has 1 to 256 printable ASCII characters without spaces, got "
            f"{len(name)} characters",
            param="session_id",
        )
    salt = body.cache_salt or call.caller.cache_salt
    known = await call.service.engine.control(CloseSession(name, salt))
    return SessionClosed(known=known)


async def _pause(call: ControlRequest, body: NoFields) -> ControlDone:
    await call.service.engine.control(Pause())
    call.service.shared.note_pause(is_paused=True)
    return ControlDone()


async def _resume(call: ControlRequest, body: NoFields) -> ControlDone:
    await call.service.engine.control(Resume())
    call.service.shared.note_pause(is_paused=False)
    return ControlDone()


async def _abort(call: ControlRequest, body: AbortRequest) -> Aborted:
    """Abort requests. An admin may abort any request, other callers only their own."""
    service = call.service
    if body.request_ids is None and not body.abort_all:
        raise RequestRefused("send request_ids or abort_all: true", param="request_ids")
    names = {known for name in body.request_ids or [] for known in _aliases(name)}
    scope = AbortScope(
        names=None if body.abort_all else sorted(names),
        owner=None if call.caller.is_admin else call.caller.name,
    )
    return Aborted(aborted=await service.shared.abort(scope))


async def _reload(call: ControlRequest, body: ReloadRequest) -> ReloadAnswer:
    """Reload the weights: the engine stops admitting, waits until nothing runs, and reads them.
    Requests that wait meanwhile are served with the new weights. A failure changes nothing."""
    service = call.service
    folder = _reload_folder(service, body.model)
    before = service.engine.info.fingerprint
    timeout_s = body.drain_timeout_s
    if timeout_s is None:
        timeout_s = service.config.drain_timeout_s
    if service.reloading.locked():
        raise RequestRefused(
            "another reload is running; retry when it has ended", status=503, code="reloading"
        )
    async with service.reloading:
        info = await service.engine.control(ReloadWeights(folder, timeout_s))
    return ReloadAnswer(fingerprint=info.fingerprint, changed=info.fingerprint != before)


def _reload_folder(service: Service, model: str | None) -> str | None:
    """The folder to read. Only folders beside the one given at start are allowed."""
    if service.config.routers:
        raise RequestRefused(
            "this instance is registered at a router, and all instances of a router must serve the same "
            "weights; restart the instance with the other model instead"
        )
    if model is None:
        return None
    started = None if service.engine_config is None else service.engine_config.model
    if started is None or Path(model).resolve().parent != Path(started).resolve().parent:
        raise RequestRefused(
            f"model must be a folder in the same parent folder as {started}, got {model[:256]!r}",
            param="model",
        )
    return str(Path(model).resolve())


def _aliases(name: str) -> tuple[str, ...]:
    """The request ids that `name` may stand for: clients also send the id of the response."""
    return name, name.removeprefix("chatcmpl-"), name.removeprefix("cmpl-")


CONTROL_VERBS = (
    ControlVerb(
        paths=("/reset_prefix_cache", "/flush_cache"),
        summary="Remove the cached blocks of some tiers; running requests keep theirs.",
        run=_reset,
        body=ResetRequest,
        answer=ResetAnswer,
    ),
    ControlVerb(
        paths=("/cache/sessions/{session_id:path}",),
        summary="Close a session: its blocks are evicted first.",
        run=_close_session,
        body=CloseSessionRequest,
        answer=SessionClosed,
    ),
    ControlVerb(
        paths=("/v1/pause",), summary="Stop admitting; running requests continue.", run=_pause
    ),
    ControlVerb(paths=("/v1/resume",), summary="Admit requests again.", run=_resume),
    ControlVerb(
        paths=("/v1/abort_requests",),
        summary="Abort requests by id, or all of them.",
        run=_abort,
        body=AbortRequest,
        answer=Aborted,
        needs_body=True,
    ),
    ControlVerb(
        paths=("/v1/reload_weights",),
        summary="Read the weights again, or those of a folder beside them.",
        run=_reload,
        body=ReloadRequest,
        answer=ReloadAnswer,
    ),
)
