"""GET /openapi.json, written from the same types that requests are read into."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headwater.config import VERSION
from headwater.server import answers, dashboard, schema, watch
from headwater.server.errors import ErrorAnswer
from headwater.server.reply import JsonReply
from headwater.server.unsupported import NEUTRAL

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
    400: "The request is wrong; `param` names the field where there is one.",
    401: "The API key is missing or wrong.",
    404: "No such model, or no such file.",
    413: "The body is too long.",
    429: "As many requests wait as may wait; see Retry-After.",
    499: "Aborted before it was done.",
    503: "Starting, stopping, or the engine is dead.",
}

_Path = dict[str, Any]


async def openapi(request: Request) -> Response:
    """The document."""
    return JsonReply(document())


@cache
def document() -> dict[str, Any]:
    """What this server answers, path by path."""
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
    generation = (400, 401, 404, 413, 429, 499, 503)
    text = (400, 401, 404, 413, 503)
    plain = (401, 503)
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
        "/v1/models": _get("The served model.", answers.ModelList, plain),
        "/v1/models/{name}": _named_model(),
        "/tokenize": _post(
            "Token ids of a text.", schema.TokenizeRequest, answers.TokenizeAnswer, text
        ),
        "/detokenize": _post(
            "Text of token ids.", schema.DetokenizeRequest, answers.DetokenizeAnswer, text
        ),
        "/health": _get("Whether the engine lives; cheap.", answers.Health, (503,)),
        "/health_generate": _get(
            "Whether it can generate; runs the model.", answers.Health, (401, 429, 499, 503)
        ),
        "/version": _get("The program's version.", answers.Version, plain),
        "/metrics": {"get": _operation("A Prometheus scrape.", _plain_text(), plain)},
        "/server_info": {"get": _operation("How it was started.", _any_object(), plain)},
        "/cache": {"get": _operation("Tiers and hit ledger.", _any_object(), plain)},
        "/cache/sessions/{session_id}": _named_session(),
        "/cache/tree": _tree(),
        "/stats": {"get": _operation("All that a watcher shows.", _any_object(), plain)},
        dashboard.PATH: {"get": _operation("The page that shows it.", _page(), (503,))},
        dashboard.PATH + "/{name}": _part(),
        "/reset_prefix_cache": _reset(),
        "/flush_cache": _reset(),
        "/v1/pause": _control("Stop admitting; running requests go on."),
        "/v1/resume": _control("Admit again."),
        "/v1/reload_weights": _reload(),
        "/v1/abort_requests": _post(
            "End requests by name.", schema.AbortRequest, answers.Aborted, (400, 401, 413, 503)
        ),
    }


def _post(
    summary: str, body: type, answer: type, errors: Sequence[int], *, streams: bool = False
) -> _Path:
    content = _json(answer)
    if streams:
        # Without a type: readers of the document disagree on whether an event is its text.
        content["text/event-stream"] = {"schema": {"description": "A chunk each, then [DONE]."}}
    operation = _operation(summary, content, errors)
    operation["requestBody"] = {"required": True, "content": _json(body)}
    return {"post": operation}


def _get(summary: str, answer: type, errors: Sequence[int]) -> _Path:
    return {"get": _operation(summary, _json(answer), errors)}


def _reset() -> _Path:
    path = _post(
        "Forget the cached blocks of some tiers.",
        schema.ResetRequest,
        answers.ResetAnswer,
        (400, 401, 413, 503),
    )
    path["post"]["requestBody"]["required"] = False
    return path


def _reload() -> _Path:
    path = _post(
        "Read the weights again, or those of a folder beside them.",
        schema.ReloadRequest,
        answers.ReloadAnswer,
        (400, 401, 413, 503),
    )
    path["post"]["requestBody"]["required"] = False
    return path


def _control(summary: str) -> _Path:
    return {"post": _operation(summary, _json(answers.ControlDone), (400, 401, 503))}


def _named_session() -> _Path:
    path = _post(
        "A session is over: its blocks go first.",
        schema.CloseSessionRequest,
        answers.SessionClosed,
        (400, 401, 404, 413, 503),  # clients take names such as ".." out of the path
    )
    path["post"]["requestBody"]["required"] = False
    name = {"type": "string", "pattern": schema.SESSION_ID}
    path["post"]["parameters"] = [
        {"name": "session_id", "in": "path", "required": True, "schema": name}
    ]
    return path


def _named_model() -> _Path:
    path = _get("The served model, by name.", answers.ModelCard, (401, 404, 503))
    path["get"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return path


def _tree() -> _Path:
    operation = _operation("The prefix tree's shape.", _any_object(), (400, 401, 503))
    operation["parameters"] = [
        {
            "name": name,
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": most, "default": default},
        }
        for name, default, most in (
            ("depth", watch.DEFAULT_DEPTH, watch.MOST_DEPTH),
            ("limit", watch.DEFAULT_NODES, watch.MOST_NODES),
        )
    ]
    return {"get": operation}


def _part() -> _Path:
    operation = _operation("A file of the page.", _page(), (404, 503))
    operation["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {"get": operation}


def _page() -> dict[str, Any]:
    kinds = ("text/html", "text/css", "text/javascript", "image/svg+xml")
    return {kind: {"schema": {"type": "string"}} for kind in kinds}


def _operation(summary: str, content: dict[str, Any], errors: Sequence[int]) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for status in errors:
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": _json(ErrorAnswer),
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
        schema.TokenizeRequest,
        schema.DetokenizeRequest,
        schema.AbortRequest,
        schema.ReloadRequest,
        answers.ReloadAnswer,
        schema.ResetRequest,
        schema.CloseSessionRequest,
        answers.CompletionAnswer,
        answers.ChatAnswer,
        answers.ModelList,
        answers.TokenizeAnswer,
        answers.DetokenizeAnswer,
        answers.Health,
        answers.Version,
        answers.ControlDone,
        answers.ResetAnswer,
        answers.Aborted,
        answers.SessionClosed,
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
