"""GET /openapi.json, generated from the types that requests are parsed into."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headwater.config import VERSION
from headwater.server import (
    answers,
    dashboard,
    messages_schema,
    responses_schema,
    schema,
    stats,
)
from headwater.server.body import NEUTRAL, JsonResponse
from headwater.server.control import CONTROL_VERBS, ControlVerb
from headwater.server.errors import ErrorAnswer

_REF = "#/components/schemas/{name}"
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT = {
    "description": "Text, token ids, or a list of either.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
    ],
}

_ERRORS = {
    400: "Invalid request; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The key has no scope for this, or a foreign web page sent it.",
    404: "No such model or file.",
    413: "The body is over the size limit.",
    415: "A control body that is not application/json.",
    429: "The queue or a limit of the key is full; see Retry-After.",
    499: "Aborted before it was complete.",
    503: "Starting, stopping, or the engine is dead.",
}

_Path = dict[str, Any]


async def openapi(request: Request) -> Response:
    """Answer GET /openapi.json."""
    return JsonResponse(document())


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headwater", "version": VERSION},
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _paths() -> dict[str, _Path]:
    generation = (400, 401, 403, 404, 413, 429, 499, 503)
    text = (400, 401, 403, 404, 413, 503)
    plain = (401, 403, 503)
    return {
        "/v1/completions": _post(
            "Continue a text.",
            schema.CompletionRequest,
            answers.CompletionAnswer,
            generation,
            streams=True,
        ),
        "/v1/chat/completions": _post(
            "Continue a conversation.",
            schema.ChatRequest,
            answers.ChatAnswer,
            generation,
            streams=True,
        ),
        "/v1/responses": _post(
            "Continue a conversation whose turns the server may keep.",
            responses_schema.ResponsesRequest,
            responses_schema.ResponsesAnswer,
            generation,
            streams=True,
        ),
        "/v1/responses/{response_id}": _named_response(),
        "/v1/messages": _post(
            "Continue a conversation in Anthropic's format.",
            messages_schema.MessagesRequest,
            messages_schema.MessagesAnswer,
            generation,
            streams=True,
            error=messages_schema.MessagesError,
        ),
        "/v1/messages/count_tokens": _post(
            "Tokens of a conversation in Anthropic's format.",
            messages_schema.CountTokensRequest,
            messages_schema.CountTokensAnswer,
            text,
            error=messages_schema.MessagesError,
        ),
        "/v1/models": _get("The served model.", answers.ModelList, plain),
        "/v1/models/{name}": _named_model(),
        "/tokenize": _post(
            "Token ids of a text.", schema.TokenizeRequest, answers.TokenizeAnswer, text
        ),
        "/detokenize": _post(
            "Text of token ids.", schema.DetokenizeRequest, answers.DetokenizeAnswer, text
        ),
        "/health": _get("Whether the engine is alive; cheap.", answers.Health, (503,)),
        "/health_generate": _get(
            "Whether the engine can generate; runs the model.",
            answers.Health,
            (401, 429, 499, 503),
        ),
        "/version": _get("The version of the server.", answers.Version, plain),
        "/metrics": {"get": _operation("A Prometheus scrape.", _plain_text(), plain)},
        "/server_info": {
            "get": _operation("Settings of the server, without secrets.", _any_object(), plain)
        },
        "/cache": {"get": _operation("Tiers, hits and misses.", _any_object(), plain)},
        "/cache/tree": _tree(),
        "/stats": {"get": _operation("What the dashboard shows.", _any_object(), plain)},
        "/stats/history": _history(),
        dashboard.PATH: {"get": _operation("The dashboard.", _page(), (503,))},
        dashboard.PATH + "/{name}": _part(),
        **{_plain_path(path): _verb(verb) for verb in CONTROL_VERBS for path in verb.paths},
    }


def _post(
    summary: str,
    body: type,
    answer: type,
    errors: Sequence[int],
    *,
    streams: bool = False,
    error: type = ErrorAnswer,
) -> _Path:
    content = _json(answer)
    if streams:
        # No type: tools disagree on whether an event stream is a string.
        content["text/event-stream"] = {
            "schema": {"description": "One chunk per event, then [DONE]."}
        }
    operation = _operation(summary, content, errors, error)
    operation["requestBody"] = {"required": True, "content": _json(body)}
    return {"post": operation}


def _get(summary: str, answer: type, errors: Sequence[int]) -> _Path:
    return {"get": _operation(summary, _json(answer), errors)}


def _verb(verb: ControlVerb) -> _Path:
    errors = (
        400,
        401,
        403,
        404,
        413,
        415,
        503,
    )  # 404: clients normalise ids such as ".." in a path
    path = _post(verb.summary, verb.body, verb.answer, errors)
    path["post"]["requestBody"]["required"] = verb.needs_body
    if "{session_id" in verb.paths[0]:
        name = {"type": "string", "pattern": schema.SESSION_ID}
        path["post"]["parameters"] = [
            {"name": "session_id", "in": "path", "required": True, "schema": name}
        ]
    return path


def _plain_path(path: str) -> str:
    """A route's path as OpenAPI writes it: without the converter of a parameter."""
    return path.replace(":path}", "}")


def _named_response() -> _Path:
    path = _get("A stored response.", responses_schema.ResponsesAnswer, (401, 404, 503))
    deleted = _json(responses_schema.ResponseDeleted)
    path["delete"] = _operation("Forget a stored response.", deleted, (401, 404, 503))
    for operation in path.values():
        operation["parameters"] = [
            {
                "name": "response_id",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "pattern": responses_schema.RESPONSE_ID},
            }
        ]
    return path


def _named_model() -> _Path:
    path = _get("The served model, by name.", answers.ModelCard, (401, 404, 503))
    path["get"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return path


def _tree() -> _Path:
    operation = _operation("The shape of the prefix tree.", _any_object(), (400, 401, 503))
    operation["parameters"] = [
        {
            "name": name,
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": most, "default": default},
        }
        for name, default, most in (
            ("depth", stats.DEFAULT_DEPTH, stats.MOST_DEPTH),
            ("limit", stats.DEFAULT_NODES, stats.MOST_NODES),
        )
    ]
    return {"get": operation}


def _history() -> _Path:
    operation = _operation("The last ten minutes.", _any_object(), (400, 401, 503))
    operation["parameters"] = [
        {"name": "after", "in": "query", "schema": {"type": "number", "minimum": 0}}
    ]
    return {"get": operation}


def _part() -> _Path:
    operation = _operation("A file of the dashboard.", _page(), (404, 503))
    operation["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {"get": operation}


def _page() -> dict[str, Any]:
    kinds = ("text/html", "text/css", "text/javascript", "image/svg+xml")
    return {kind: {"schema": {"type": "string"}} for kind in kinds}


def _operation(
    summary: str, content: dict[str, Any], errors: Sequence[int], error: type = ErrorAnswer
) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "Success.", "content": content}}
    for status in errors:
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": _json(error),
        }
    return {"summary": summary, "responses": responses}


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}


def _plain_text() -> dict[str, Any]:
    return {"text/plain": {"schema": {"type": "string"}}}


def _any_object() -> dict[str, Any]:
    return {"application/json": {"schema": {"type": "object"}}}


def _schemas() -> dict[str, Any]:
    kinds: list[type] = [
        schema.CompletionRequest,
        schema.ChatRequest,
        responses_schema.ResponsesRequest,
        responses_schema.ResponsesAnswer,
        responses_schema.ResponseDeleted,
        messages_schema.MessagesRequest,
        messages_schema.MessagesAnswer,
        messages_schema.MessagesError,
        messages_schema.CountTokensRequest,
        messages_schema.CountTokensAnswer,
        schema.TokenizeRequest,
        schema.DetokenizeRequest,
        answers.CompletionAnswer,
        answers.ChatAnswer,
        answers.ModelList,
        answers.TokenizeAnswer,
        answers.DetokenizeAnswer,
        answers.Health,
        answers.Version,
        *{kind for verb in CONTROL_VERBS for kind in (verb.body, verb.answer)},
        ErrorAnswer,
    ]
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    components["CompletionRequest"]["properties"]["prompt"] = _PROMPT
    for name in ("CompletionRequest", "ChatRequest"):
        properties = components[name]["properties"]
        for field, neutral in NEUTRAL.items():
            if field in properties:
                properties[field] = {"description": "Not supported.", "enum": list(neutral)}
    return dict(components)
