"""Everything that is not generation: health, models, metrics, and control of the cache."""

import asyncio
import re
from dataclasses import asdict
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from headwater.config import VERSION
from headwater.engine.client import MEMORY, EngineInfo
from headwater.errors import EngineDead
from headwater.metrics.prometheus import CONTENT_TYPE, render
from headwater.metrics.stats import EngineStats
from headwater.scheduler.load_state import MeasuredRates
from headwater.scheduler.request import SamplingParams
from headwater.server.answers import (
    Aborted,
    ControlDone,
    Health,
    ModelCard,
    ModelList,
    ResetAnswer,
    SessionClosed,
    Version,
)
from headwater.server.body import read_body
from headwater.server.errors import RequestRefused
from headwater.server.generation import Delta, Generation, GenerationJob, GenerationPrompt
from headwater.server.reply import JsonReply
from headwater.server.schema import SESSION_ID, AbortRequest, CloseSessionRequest, ResetRequest
from headwater.server.service import Service

_STATS_TIMEOUT_S = 5.0
_DEEP_TIMEOUT_S = 30.0


async def health(request: Request) -> Response:
    """Whether the engine lives. Asks nobody: it never waits and never runs the model."""
    engine = _service(request).engine
    if engine.dead is not None:
        raise EngineDead(engine.dead)
    return JsonReply(Health())


async def health_generate(request: Request) -> Response:
    """Whether the engine can generate: runs one token through the model."""
    service = _service(request)
    prompt = GenerationPrompt(
        tokens=np.zeros(1, dtype=np.int32), params=SamplingParams(max_tokens=1, temperature=0.0)
    )
    job = GenerationJob(name="health", prompts=[prompt], num_choices=1, priority=-(1 << 31))

    async def ignore(delta: Delta) -> None:
        return None

    try:
        async with asyncio.timeout(_DEEP_TIMEOUT_S):
            await Generation(service, job).run(ignore)
    except TimeoutError as exc:
        raise RequestRefused(f"no token within {_DEEP_TIMEOUT_S:.0f} s", status=503) from exc
    return JsonReply(Health())


async def models(request: Request) -> Response:
    """The one model there is."""
    return JsonReply(ModelList(data=[_card(_service(request))]))


async def model(request: Request) -> Response:
    """The one model there is, by name."""
    service = _service(request)
    service.check_model(request.path_params["name"])
    return JsonReply(_card(service))


async def version(request: Request) -> Response:
    """The version of this program."""
    return JsonReply(Version(version=VERSION))


async def metrics(request: Request) -> Response:
    """A Prometheus scrape; a dead engine leaves the server's own part."""
    service = _service(request)
    try:
        stats = await _stats(service)
    except (EngineDead, RequestRefused):
        stats = None
    body = render(
        service.recorder,
        stats,
        block_tokens=service.engine.info.block_tokens,
        num_violations=service.engine.num_violations,
        vllm_names=service.config.vllm_metric_names,
    )
    return Response(body, media_type=CONTENT_TYPE)


async def server_info(request: Request) -> Response:
    """How this server was started, without its secrets."""
    service = _service(request)
    config = asdict(service.config)
    config["api_key"] = service.config.api_key is not None
    config["peer_token"] = service.config.peer_token is not None
    asked = None if service.engine_config is None else asdict(service.engine_config)
    if asked is not None:
        # A backend's settings may hold a password; their names do not.
        asked["storage_config"] = sorted(asked["storage_config"])
    return JsonReply(
        {
            "version": VERSION,
            "model": service.model_name,
            "engine": asdict(service.engine.info),
            "engine_config": asked,
            "server": config,
            "kv_events": _kv_events(service.engine.info),
        }
    )


async def cache(request: Request) -> Response:
    """Tiers, occupancy, and what the cache found and missed so far."""
    service = _service(request)
    return JsonReply(cache_state(service, await _stats(service)))


def cache_state(service: Service, stats: EngineStats) -> dict[str, Any]:
    """The body of GET /cache."""
    block_tokens = service.engine.info.block_tokens
    return {
        "block_tokens": block_tokens,
        "min_prefix_tokens": service.engine.info.min_prefix_tokens,
        "tiers": {name: asdict(tier) for name, tier in stats.tiers.items()},
        "links": {name: asdict(link) for name, link in stats.links.items()},
        "storage": None if stats.storage is None else asdict(stats.storage),
        "ledger": {
            "queries": stats.queries,
            "query_tokens": stats.query_tokens,
            "found_tokens": stats.found_tokens,
            "misses": stats.misses,
            "load_choices": stats.load_choices,
            "recent_loads": [asdict(load) for load in stats.recent_loads],
        },
        "prices": _prices(stats.rates),
        "sessions": {
            "known": stats.num_sessions,
            "promised_blocks": stats.promised_blocks,
            "hints": stats.hints,
        },
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_preemptions": stats.num_preemptions,
        "is_paused": stats.is_paused,
    }


async def reset_prefix_cache(request: Request) -> Response:
    """Forget the cached blocks of some tiers; running requests keep theirs and go on."""
    service = _service(request)
    body = await read_body(
        request, ResetRequest, max_bytes=service.config.limits.max_body_bytes, optional=True
    )
    report = await service.engine.reset_cache(body.tiers or MEMORY)
    return JsonReply(ResetAnswer(removed=report.removed, kept=report.kept))


async def close_session(request: Request) -> Response:
    """Nothing more of a session will come: its blocks are the first to go when room is needed."""
    service = _service(request)
    name = request.path_params["session_id"]
    if not re.match(SESSION_ID, name):
        raise RequestRefused(
            "a session id is 1 to 256 printable ASCII characters without spaces",
            param="session_id",
        )
    body = await read_body(
        request,
        CloseSessionRequest,
        max_bytes=service.config.limits.max_body_bytes,
        optional=True,
    )
    known = await service.engine.close_session(name, body.cache_salt or "")
    return JsonReply(SessionClosed(known=known))


async def pause(request: Request) -> Response:
    """Stop admitting requests; those running go on."""
    await _service(request).engine.pause()
    return JsonReply(ControlDone())


async def resume(request: Request) -> Response:
    """Admit requests again."""
    await _service(request).engine.resume()
    return JsonReply(ControlDone())


async def abort_requests(request: Request) -> Response:
    """End requests by the names their clients gave them, or all of them."""
    service = _service(request)
    body = await read_body(
        request, AbortRequest, max_bytes=service.config.limits.max_body_bytes
    )
    if body.request_ids is None and not body.abort_all:
        raise RequestRefused("give request_ids, or abort_all: true", param="request_ids")
    if body.abort_all:
        return JsonReply(Aborted(aborted=await service.engine.abort(None)))
    names = {known for name in body.request_ids or [] for known in _own_names(name)}
    ids = [entry for name in names for entry in service.live.sequences_of(name)]
    return JsonReply(Aborted(aborted=await service.engine.abort(ids)))


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _kv_events(info: EngineInfo) -> dict[str, object] | None:
    """What a consumer needs to follow this instance, its epoch included."""
    if info.kv_events is None:
        return None
    return {
        **asdict(info.kv_events),
        "epoch": info.epoch,
        "block_size": info.block_tokens,
        "kv_format": info.kv_format,
        "fingerprint": info.fingerprint,
    }


def _card(service: Service) -> ModelCard:
    return ModelCard(
        id=service.model_name,
        created=service.created,
        root=service.engine.info.model_name,
        max_model_len=service.engine.info.max_model_len,
    )


async def _stats(service: Service) -> EngineStats:
    try:
        async with asyncio.timeout(_STATS_TIMEOUT_S):
            return await service.engine.stats()
    except TimeoutError as exc:
        raise RequestRefused("the engine is in a long step; try again", status=503) from exc


def _prices(rates: MeasuredRates) -> dict[str, object]:
    """What load-or-recompute is priced from; null is not measured lately."""
    host, storage = rates.host, rates.storage
    return {
        "prefill_tokens_s": rates.prefill_tokens_s,
        "host_to_device": None if host is None else host._asdict(),
        "storage_to_host": None if storage is None else storage._asdict(),
    }


def _own_names(name: str) -> tuple[str, ...]:
    """What a request is called if this is its own name, and if it is the id of its answer."""
    return name, name.removeprefix("chatcmpl-"), name.removeprefix("cmpl-")
