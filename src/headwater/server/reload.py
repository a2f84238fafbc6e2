"""POST /v1/reload_weights: other weights without another server.

Nobody new is admitted while running requests finish; those that wait meanwhile are served
with the new weights. What cannot be done changes nothing and says why.
"""

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from headwater.server.answers import ReloadAnswer
from headwater.server.body import read_body
from headwater.server.errors import RequestRefused
from headwater.server.reply import JsonReply
from headwater.server.schema import ReloadRequest
from headwater.server.service import Service

_LOOK_EVERY_S = 0.02


async def reload_weights(request: Request) -> Response:
    """The endpoint."""
    service: Service = request.app.state.service
    body = await read_body(
        request, ReloadRequest, max_bytes=service.config.limits.max_body_bytes, optional=True
    )
    folder = _folder(service, body.model)
    before = service.engine.info.fingerprint
    if service.reloading.locked():
        raise RequestRefused("weights are being read already", status=503, code="reloading")
    async with service.reloading:
        patience_s = body.drain_timeout_s
        await _drain(
            service, service.config.drain_timeout_s if patience_s is None else patience_s
        )
        try:
            info = await service.engine.reload(folder)
        finally:
            await service.engine.resume()
    return JsonReply(
        ReloadAnswer(fingerprint=info.fingerprint, changed=info.fingerprint != before)
    )


def _folder(service: Service, model: str | None) -> str | None:
    """The folder asked for; only those beside the one that was given at start can be."""
    if service.config.router is not None:
        raise RequestRefused("an instance of a router is restarted for other weights")
    if model is None:
        return None
    started = None if service.engine_config is None else service.engine_config.model
    if started is None or Path(model).resolve().parent != Path(started).resolve().parent:
        raise RequestRefused(
            "model is a folder beside the one this server was started with", param="model"
        )
    return str(Path(model).resolve())


async def _drain(service: Service, patience_s: float) -> None:
    """Admit nobody until nothing runs; admit again and refuse if that takes too long."""
    await service.engine.pause()
    end_s = service.clock.now() + patience_s
    while (await service.engine.stats()).num_running:
        if service.clock.now() >= end_s:
            await service.engine.resume()
            raise RequestRefused(
                f"requests still ran after {patience_s:g} s; nothing was changed",
                status=503,
                code="not_drained",
            )
        await asyncio.sleep(_LOOK_EVERY_S)
