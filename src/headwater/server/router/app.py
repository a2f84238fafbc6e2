"""create_router_app(router): the router's own endpoints and the forwarded ones."""

from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headwater.clock import Clock
from headwater.config import VERSION
from headwater.metrics.prometheus import CONTENT_TYPE
from headwater.server import dashboard
from headwater.server.answers import Health, ModelCard, ModelList, Version
from headwater.server.app import EXCEPTION_HANDLERS
from headwater.server.body import ASGIResponse, JsonResponse, decode_json, read_raw
from headwater.server.cluster_auth import check_digest
from headwater.server.control import ControlDone
from headwater.server.errors import RequestRefused
from headwater.server.router.config import RouterConfig
from headwater.server.router.forwarding import Forwarder
from headwater.server.router.instance import Instance
from headwater.server.router.metrics import RouterRecorder
from headwater.server.router.protocol import (
    DIGEST_HEADER,
    MAX_BYTES,
    Registered,
    Registration,
)
from headwater.server.router.registry import SERVING, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The parts of a router that its endpoints use."""

    config: RouterConfig
    clock: Clock
    registry: Registry
    forwarder: Forwarder
    recorder: RouterRecorder
    created_s: int
    """Unix time of the start."""


async def forward(request: Request) -> ASGIResponse:
    """Forward a request to an instance."""
    return await _router(request).forwarder.forward(request)


async def health(request: Request) -> Response:
    """Whether at least one instance can serve."""
    _ready(_router(request))
    return JsonResponse(Health())


async def models(request: Request) -> Response:
    """Every model that a ready instance serves; an upgrade or two groups may have several."""
    return JsonResponse(ModelList(data=list(_cards(_router(request)).values())))


async def model(request: Request) -> Response:
    """One of the served models, by name."""
    name, cards = request.path_params["name"], _cards(_router(request))
    if name not in cards:
        raise RequestRefused(
            f"the model {name[:256]!r} does not exist here; the instances of this router serve "
            f"{', '.join(map(repr, cards))}",
            param="model",
            status=404,
            code="model_not_found",
        )
    return JsonResponse(cards[name])


async def version(request: Request) -> Response:
    """The version of the router."""
    return JsonResponse(Version(version=VERSION))


async def metrics(request: Request) -> Response:
    """A Prometheus scrape."""
    router = _router(request)
    body = router.recorder.render(
        router.registry.instances, now=router.clock.now(), stale_s=router.config.stale_s
    )
    return Response(body, media_type=CONTENT_TYPE)


async def instances(request: Request) -> Response:
    """The registered instances with their state, lost instances, and prefills by pair of instances."""
    router = _router(request)
    found = [_described(router, entry) for entry in router.registry.instances]
    return JsonResponse(
        {
            "policy": router.config.policy,
            "instances": found,
            "lost": [_lost(router, entry) for entry in router.registry.lost],
            "prefills": router.recorder.prefills(),
        }
    )


async def register(request: Request) -> Response:
    """Register an instance, or record its heartbeat."""
    router = _router(request)
    raw = await read_raw(request, MAX_BYTES)
    if not check_digest(request.headers.get(DIGEST_HEADER), raw):
        raise RequestRefused(
            "the body does not match its signed digest; it was changed on the way. Send it again",
            status=403,
            code="peer_token",
        )
    router.registry.register(decode_json(raw, Registration))
    return JsonResponse(Registered(heartbeat_s=router.config.heartbeat_s))


async def drain(request: Request) -> Response:
    """Send no new requests to an instance."""
    router = _router(request)
    name = request.path_params["name"]
    if router.registry.drain(name) is None:
        raise RequestRefused(
            f"no instance {name[:256]!r} is registered; see GET /instances", status=404
        )
    return JsonResponse(ControlDone())


ROUTES = [
    Route("/v1/completions", forward, methods=["POST"]),
    Route("/v1/chat/completions", forward, methods=["POST"], name="chat"),
    Route("/v1/responses", forward, methods=["POST"], name="responses"),
    Route("/v1/responses/{response_id}", forward, methods=["GET", "DELETE"], name="response"),
    Route("/v1/messages", forward, methods=["POST"], name="messages"),
    Route("/v1/messages/count_tokens", forward, methods=["POST"], name="count_tokens"),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{name:path}", model, methods=["GET"]),
    Route("/tokenize", forward, methods=["POST"], name="tokenize"),
    Route("/detokenize", forward, methods=["POST"], name="detokenize"),
    Route("/health", health, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/instances", instances, methods=["GET"]),
    Route(dashboard.PATH, dashboard.router_page, methods=["GET"]),
    Route(dashboard.PATH + "/{name}", dashboard.static_file, methods=["GET"]),
    Route("/instances", register, methods=["POST"]),
    Route("/instances/{name:path}", drain, methods=["DELETE"]),
]


def create_router_app(router: Router) -> Starlette:
    """The application over one router."""
    app = Starlette(routes=ROUTES, exception_handlers=EXCEPTION_HANDLERS)
    app.state.router = router
    return app


def _router(request: Request) -> Router:
    router: Router = request.app.state.router
    return router


def _ready(router: Router) -> list[Instance]:
    """Instances that may get a request now. Raises RequestRefused when there is none."""
    ready = router.registry.ready(SERVING)
    if not ready:
        raise RequestRefused(
            "no instance is ready; start one with headwater serve --router URL",
            status=503,
            code="no_instance",
        )
    return ready


def _cards(router: Router) -> dict[str, ModelCard]:
    """The served models by name, each with the lowest prompt limit of its instances."""
    cards: dict[str, ModelCard] = {}
    for entry in _ready(router):
        name, limit = entry.registration.model, entry.registration.max_model_len
        known = cards.get(name)
        cards[name] = ModelCard(
            id=name,
            created=router.created_s,
            root=name,
            max_model_len=limit if known is None else min(limit, known.max_model_len),
        )
    return cards


def _described(router: Router, entry: Instance) -> dict[str, object]:
    registration = msgspec.to_builtins(entry.registration)
    now = router.clock.now()
    return {
        **registration,
        "group": entry.group.label,
        "state": entry.state(now=now, stale_s=router.config.stale_s),
        "trust": entry.trust.value,
        "known_blocks": entry.view.num_blocks,
        "next_sequence": entry.view.next,
        "gaps": entry.num_gaps,
        "num_alive": entry.num_alive,
        "outstanding_tokens": entry.outstanding_tokens,
        "recent_tokens": round(entry.recent.tokens(now=now)),
        "seen_s_ago": round(now - entry.seen_s, 3),
    }


def _lost(router: Router, entry: Instance) -> dict[str, object]:
    registration = entry.registration
    return {
        "instance_id": entry.name,
        "role": registration.role,
        "url": registration.url,
        "seen_s_ago": round(router.clock.now() - entry.seen_s, 3),
    }
