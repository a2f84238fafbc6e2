"""The fields that constrain an answer, as `StructuredOutput`."""

from typing import Any

from headwater.engine.structured import StructuredOutput
from headwater.errors import RequestError
from headwater.server.errors import RequestRefused
from headwater.server.schema import ResponseFormat, Sampling, StructuredFields


def structured_output(body: Sampling) -> StructuredOutput | None:
    """What the answer must look like; None where anything may be said.

    Raises RequestRefused where two fields constrain it, or one makes no sense.
    """
    wanted = {
        "response_format": _of_format(body.response_format),
        "structured_outputs": _of_fields(body.structured_outputs),
        "guided_json": _one(json=body.guided_json),
        "guided_regex": _one(regex=body.guided_regex),
        "guided_choice": _one(choice=body.guided_choice),
        "guided_grammar": _one(grammar=body.guided_grammar),
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    if len(given) > 1:
        raise RequestRefused(
            f"an answer can be constrained in one way; got {', '.join(given)}",
            param=list(given)[1],
        )
    for name, fields in given.items():
        try:
            return StructuredOutput(**fields)
        except RequestError as exc:
            raise RequestRefused(str(exc), param=name) from exc
    return None


def constraint_param(body: Sampling) -> str:
    """The field that an error about the grammar names."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(body, name) is not None:
            return name
    return "response_format"


_Fields = dict[str, Any]


def _of_format(wanted: ResponseFormat | None) -> _Fields | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None:
        raise RequestRefused(
            "response_format of type json_schema needs json_schema", param="response_format"
        )
    return {"json": wanted.json_schema.schema}


def _of_fields(wanted: StructuredFields | None) -> _Fields | None:
    if wanted is None:
        return None
    names = ("json", "regex", "choice", "grammar", "json_object")
    return {name: getattr(wanted, name) or None for name in names if getattr(wanted, name)}


def _one(**fields: object) -> _Fields | None:
    return {k: v for k, v in fields.items() if v is not None} or None
