"""create_app(service): every route in one list, every error in one shape."""

import logging
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from headwater.errors import HeadwaterError
from headwater.server import admin, dashboard, text, watch
from headwater.server.chat import chat_completions
from headwater.server.completions import completions
from headwater.server.errors import ErrorAnswer, ErrorObject, error_response
from headwater.server.openapi import openapi
from headwater.server.reload import reload_weights
from headwater.server.reply import JsonReply
from headwater.server.service import Service
from headwater.server.streaming import ClientDisconnected

log = logging.getLogger(__name__)

ROUTES = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/models", admin.models, methods=["GET"]),
    Route("/v1/models/{name:path}", admin.model, methods=["GET"]),
    Route("/tokenize", text.tokenize, methods=["POST"]),
    Route("/detokenize", text.detokenize, methods=["POST"]),
    Route("/health", admin.health, methods=["GET"]),
    Route("/health_generate", admin.health_generate, methods=["GET"]),
    Route("/version", admin.version, methods=["GET"]),
    Route("/metrics", admin.metrics, methods=["GET"]),
    Route("/server_info", admin.server_info, methods=["GET"]),
    Route("/cache", admin.cache, methods=["GET"]),
    Route("/cache/sessions/{session_id:path}", admin.close_session, methods=["POST"]),
    Route("/cache/tree", watch.tree, methods=["GET"]),
    Route("/stats", watch.stats, methods=["GET"]),
    Route(dashboard.PATH, dashboard.page, methods=["GET"]),
    Route(dashboard.PATH + "/{name}", dashboard.part, methods=["GET"]),
    Route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
    Route("/flush_cache", admin.reset_prefix_cache, methods=["POST"], name="flush_cache"),
    Route("/v1/pause", admin.pause, methods=["POST"]),
    Route("/v1/resume", admin.resume, methods=["POST"]),
    Route("/v1/reload_weights", reload_weights, methods=["POST"]),
    Route("/v1/abort_requests", admin.abort_requests, methods=["POST"]),
    Route("/openapi.json", openapi, methods=["GET"]),
]


def create_app(service: Service) -> Starlette:
    """The application over one service. Keys and readiness are the `Gate`'s."""
    app = Starlette(
        routes=ROUTES,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.service = service
    return app


async def _on_our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadwaterError), "registered for these"
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    answer = ErrorAnswer(error=ErrorObject(message=error.detail, type=kind))
    return JsonReply(answer, status=error.status_code, headers=error.headers)


async def _on_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; it ends the exchange for the server's own books."""
    return Response(status_code=499)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("a bug in %s %s", request.method, request.url.path, exc_info=error)
    answer = ErrorAnswer(
        error=ErrorObject(
            message="an internal error; the server's log has it", type="server_error"
        )
    )
    return JsonReply(answer, status=HTTPStatus.INTERNAL_SERVER_ERROR)


EXCEPTION_HANDLERS: dict[Any, ExceptionHandler] = {
    HeadwaterError: _on_our_error,
    HTTPException: _on_http_error,
    ClientDisconnected: _on_gone,
    500: _on_bug,
}
"""Every error in one shape; the router's too."""
