"""`/stats`, `/stats/history` and `/cache/tree`: what the dashboard and `headwater top` show.

Counters and histograms count from the start of the server; clients compute rates from two
responses.
"""

import asyncio
import re
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headwater.config import VERSION
from headwater.engine.client import GetView
from headwater.metrics import names
from headwater.metrics.history import INTERVAL_S, SPAN_S
from headwater.metrics.recorder import Recorder
from headwater.metrics.stats import EngineStats
from headwater.metrics.view import EngineView, ViewLimits
from headwater.server.admin import cache_state
from headwater.server.body import JsonResponse
from headwater.server.errors import RequestRefused
from headwater.server.keys import Caller
from headwater.server.middleware import access_of
from headwater.server.service import MAX_RECENT, Service
from headwater.server.shared_state import WorkerSnapshot

_TIMEOUT_S = 5.0
_MAX_SEQUENCES = 64
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?", re.ASCII)

DEFAULT_DEPTH, MOST_DEPTH = 32, 256
DEFAULT_NODES, MOST_NODES = 512, 4096

_SHOWN = {"ttft": names.TTFT, "itl": names.ITL, "e2e": names.E2E, "queue": names.QUEUE}


async def stats(request: Request) -> Response:
    """Counters, latencies, tiers, links, running sequences and recently finished ones."""
    service: Service = request.app.state.service
    view = await _view(service, ViewLimits(max_sequences=_MAX_SEQUENCES))
    workers = await service.shared.snapshots()
    return JsonResponse(
        _counters(service, view.stats, workers)
        | _requests(workers, view, access_of(request).caller)
    )


async def history(request: Request) -> Response:
    """The points of the last minutes that are newer than `after`, a Unix time."""
    service: Service = request.app.state.service
    text = request.query_params.get("after", "0")
    if not _NUMBER.fullmatch(text):
        raise RequestRefused(
            f"after must be a Unix time in seconds, got {text[:40]!r}", param="after"
        )
    points = await service.shared.history(float(text))
    return JsonResponse(
        {
            "now_unix_s": service.unix_s(),
            "interval_s": INTERVAL_S,
            "span_s": SPAN_S,
            "points": msgspec.to_builtins(points),
        }
    )


async def counters(service: Service) -> dict[str, Any]:
    """The answer of GET /stats, except the requests in it. Raises EngineDead or
    RequestRefused."""
    view = await _view(service, ViewLimits())
    return _counters(service, view.stats, await service.shared.snapshots())


def _counters(
    service: Service, stats: EngineStats, workers: list[WorkerSnapshot]
) -> dict[str, Any]:
    recorder = Recorder.join(worker.counts for worker in workers)
    info = service.engine.info
    return {
        "version": VERSION,
        "model": service.model_name,
        "device": info.device,
        "role": info.role,
        "block_bytes": info.block_bytes,
        "started_s": service.created,
        "uptime_s": service.uptime_s,
        "engine": {
            "num_steps": stats.num_steps,
            "step_s": stats.step_s,
            "decide_s": stats.decide_s,
            "num_admitted": stats.num_admitted,
            "max_num_seqs": info.max_num_seqs,
        },
        "totals": _totals(recorder),
        "latencies": _latencies(recorder),
        "cache": cache_state(service, stats),
        "handoffs": {side: asdict(entry) for side, entry in stats.handoffs.items()},
    }


def _requests(
    workers: list[WorkerSnapshot], view: EngineView, caller: Caller
) -> dict[str, Any]:
    """Running and recently finished sequences: all for an admin, otherwise the caller's own."""
    owners: dict[str, str] = {}
    for worker in workers:
        owners |= worker.owners
    recent = [record for worker in workers for record in worker.recent]
    recent.sort(
        key=lambda entry: entry[1]["start_unix_s"] + entry[1]["duration_s"], reverse=True
    )
    return {
        "sequences": [
            asdict(sequence)
            for sequence in view.sequences
            if caller.is_admin or owners.get(sequence.request_id, "") == caller.name
        ],
        "recent": [
            record for owner, record in recent if caller.is_admin or owner == caller.name
        ][:MAX_RECENT],
    }


async def tree(request: Request) -> Response:
    """The shape of the prefix tree: `depth` levels, at most `limit` nodes."""
    limits = ViewLimits(
        max_depth=_bounded(request, "depth", DEFAULT_DEPTH, MOST_DEPTH),
        max_nodes=_bounded(request, "limit", DEFAULT_NODES, MOST_NODES),
    )
    view = await _view(request.app.state.service, limits)
    assert view.tree is not None, "a view with nodes has a tree"
    return JsonResponse(asdict(view.tree))


async def _view(service: Service, limits: ViewLimits) -> EngineView:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await service.engine.control(GetView(limits))
    except TimeoutError as exc:
        raise RequestRefused(
            f"the engine did not answer within {_TIMEOUT_S:.0f} s; retry", status=503
        ) from exc


def _bounded(request: Request, name: str, default: int, most: int) -> int:
    """A query parameter that is an integer from 1 to `most`."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        raise RequestRefused(
            f"{name} must be a number from 1 to {most}, got {text[:40]!r}", param=name
        )
    if not 1 <= int(text) <= most:
        raise RequestRefused(
            f"{name} must be a number from 1 to {most}, got {int(text)}", param=name
        )
    return int(text)


def _totals(recorder: Recorder) -> dict[str, Any]:
    """Every counter of the server; a labelled counter is an object by label value."""
    totals: dict[str, Any] = {}
    for metric in names.SERVER_METRICS:
        if metric.kind is not names.Kind.COUNTER:
            continue
        found = {label: n for (other, label), n in recorder.counts.items() if other is metric}
        totals[metric.name] = found if metric.labels else found.get("", 0)
    return totals


def _latencies(recorder: Recorder) -> dict[str, Any]:
    """Histograms: bucket bounds, counts per bucket (the last is unbounded) and the sum."""
    return {
        name: {
            "bounds": histogram.buckets,
            "counts": histogram.counts,
            "sum_s": histogram.total,
        }
        for name, histogram in (
            (name, recorder.histograms[metric]) for name, metric in _SHOWN.items()
        )
    }
