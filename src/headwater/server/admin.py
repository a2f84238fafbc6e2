"""Read-only endpoints: health, models, version, metrics, settings and cache state."""

import asyncio
from dataclasses import asdict
from typing import Any

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headwater.config import VERSION
from headwater.engine.client import EngineInfo, GetStats
from headwater.errors import EngineDead
from headwater.metrics.prometheus import CONTENT_TYPE, render
from headwater.metrics.recorder import Recorder
from headwater.metrics.stats import EngineStats
from headwater.scheduler.load_state import MeasuredRates
from headwater.scheduler.request import SamplingParams
from headwater.server.answers import Health, ModelCard, ModelList, Version
from headwater.server.body import JsonResponse
from headwater.server.errors import RequestRefused
from headwater.server.generation import Delta, Generation, GenerationJob, GenerationPrompt
from headwater.server.service import Service

_STATS_TIMEOUT_S = 5.0
_DEEP_TIMEOUT_S = 30.0


async def health(request: Request) -> Response:
    """Whether the engine is alive. Never waits and never runs the model."""
    service = _service(request)
    service.engine.check_alive()
    return JsonResponse(
        Health(
            routers=list(service.router_health.values()) or UNSET,
            warnings=list(service.engine.info.warnings) or UNSET,
        )
    )


async def health_generate(request: Request) -> Response:
    """Whether the engine can generate: generates one token."""
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
        raise RequestRefused(
            f"the engine generated no token within {_DEEP_TIMEOUT_S:.0f} s; it is overloaded "
            f"or hangs; see the log",
            status=503,
        ) from exc
    return JsonResponse(Health())


async def models(request: Request) -> Response:
    """The served model, as a list."""
    return JsonResponse(ModelList(data=[_card(_service(request))]))


async def model(request: Request) -> Response:
    """The served model, by name."""
    service = _service(request)
    service.check_model(request.path_params["name"])
    return JsonResponse(_card(service))


async def version(request: Request) -> Response:
    """The version of this program."""
    return JsonResponse(Version(version=VERSION))


async def metrics(request: Request) -> Response:
    """A Prometheus scrape; without a live engine only the server's own metrics."""
    service = _service(request)
    try:
        stats = await _stats(service)
    except (EngineDead, RequestRefused):
        stats = None
    body = render(
        Recorder.join(entry.counts for entry in await service.shared.snapshots()),
        stats,
        block_tokens=service.engine.info.block_tokens,
        num_violations=service.engine.num_violations,
        num_restarts=service.engine.num_restarts,
        vllm_names=service.config.vllm_metric_names,
    )
    return Response(body, media_type=CONTENT_TYPE)


async def server_info(request: Request) -> Response:
    """The settings of this server, without secrets."""
    service = _service(request)
    config = asdict(service.config)
    config["api_key"] = service.config.api_key is not None
    config["peer_token"] = service.config.peer_token is not None
    asked = None if service.engine_config is None else asdict(service.engine_config)
    if asked is not None:
        # Values of a backend's settings may be passwords, so only their names are shown.
        asked["storage_config"] = sorted(asked["storage_config"])
    return JsonResponse(
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
    """Tiers, occupancy, and hits and misses so far."""
    service = _service(request)
    return JsonResponse(cache_state(service, await _stats(service)))


def cache_state(service: Service, stats: EngineStats) -> dict[str, Any]:
    """The body of GET /cache."""
    block_tokens = service.engine.info.block_tokens
    return {
        "block_tokens": block_tokens,
        "min_prefix_tokens": service.engine.info.min_prefix_tokens,
        "tiers": {name: asdict(tier) for name, tier in stats.tiers.items()},
        "links": {name: asdict(link) for name, link in stats.links.items()},
        "num_duplicates": stats.num_duplicates,
        "num_unwritten": stats.num_unwritten,
        "lost_blocks": stats.lost_blocks,
        "unstored_blocks": stats.unstored_blocks,
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


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _kv_events(info: EngineInfo) -> dict[str, object] | None:
    """What a consumer of KV events needs: addresses, epoch and block identity."""
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
            return await service.engine.control(GetStats())
    except TimeoutError as exc:
        raise RequestRefused(
            f"the engine did not answer within {_STATS_TIMEOUT_S:.0f} s; retry", status=503
        ) from exc


def _prices(rates: MeasuredRates) -> dict[str, object]:
    """The measured rates behind load-or-recompute; null when not measured recently."""
    host, storage = rates.host, rates.storage
    return {
        "prefill_tokens_s": rates.prefill_tokens_s,
        "host_to_device": None if host is None else host._asdict(),
        "storage_to_host": None if storage is None else storage._asdict(),
    }
