"""create_app(service): all routes in one list, all errors in one format."""

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
from headwater.server import admin, dashboard, stats, tokenize
from headwater.server.body import JsonResponse
from headwater.server.chat import chat_completions
from headwater.server.completions import completions
from headwater.server.control import CONTROL_VERBS
from headwater.server.errors import ErrorAnswer, ErrorObject, error_response
from headwater.server.messages import count_tokens, messages
from headwater.server.openapi import openapi
from headwater.server.responses import responses, stored_response
from headwater.server.service import Service
from headwater.server.streaming import ClientDisconnected

log = logging.getLogger(__name__)

ROUTES = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/{response_id}", stored_response, methods=["GET", "DELETE"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/models", admin.models, methods=["GET"]),
    Route("/v1/models/{name:path}", admin.model, methods=["GET"]),
    Route("/tokenize", tokenize.tokenize, methods=["POST"]),
    Route("/detokenize", tokenize.detokenize, methods=["POST"]),
    Route("/health", admin.health, methods=["GET"]),
    Route("/health_generate", admin.health_generate, methods=["GET"]),
    Route("/version", admin.version, methods=["GET"]),
    Route("/metrics", admin.metrics, methods=["GET"]),
    Route("/server_info", admin.server_info, methods=["GET"]),
    Route("/cache", admin.cache, methods=["GET"]),
    Route("/cache/tree", stats.tree, methods=["GET"]),
    Route("/stats", stats.stats, methods=["GET"]),
    Route("/stats/history", stats.history, methods=["GET"]),
    Route(dashboard.PATH, dashboard.page, methods=["GET"]),
    Route(dashboard.PATH + "/{name}", dashboard.static_file, methods=["GET"]),
    *(route for verb in CONTROL_VERBS for route in verb.routes()),
    Route("/openapi.json", openapi, methods=["GET"]),
]


def create_app(service: Service) -> Starlette:
    """The application of one service. `ReadinessMiddleware` checks keys in front of it."""
    app = Starlette(
        routes=ROUTES,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.service = service
    app.state.parser = service.parser
    return app


async def _on_our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadwaterError), "registered for this class"
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this class"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    answer = ErrorAnswer(error=ErrorObject(message=error.detail, type=kind))
    return JsonResponse(answer, status=error.status_code, headers=error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """No client reads this response; it ends the exchange for the HTTP server."""
    return Response(status_code=499)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error(
        "unexpected error: method=%s path=%s", request.method, request.url.path, exc_info=error
    )
    answer = ErrorAnswer(
        error=ErrorObject(
            message="internal error; the server's log has the details", type="server_error"
        )
    )
    return JsonResponse(answer, status=HTTPStatus.INTERNAL_SERVER_ERROR)


EXCEPTION_HANDLERS: dict[Any, ExceptionHandler] = {
    HeadwaterError: _on_our_error,
    HTTPException: _on_http_error,
    ClientDisconnected: _on_disconnect,
    500: _on_bug,
}
"""Converts every error to the OpenAI error object; the router uses it too."""
