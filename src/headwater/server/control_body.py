"""Bodies of control endpoints: an error about a wrong field or value lists the valid ones.

An ignored field would be dangerous here: a reset that misspells `tiers` would reset every tier.
"""

import re
from typing import TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import Request

from headwater.server.body import read_body
from headwater.server.errors import RequestRefused

S = TypeVar("S", bound=msgspec.Struct)

_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]{1,100})`")


async def read_control_body(
    request: Request, kind: type[S], *, max_bytes: int, optional: bool
) -> S:
    """`read_body`, whose 400 lists the valid fields and their values."""
    try:
        return await read_body(request, kind, max_bytes=max_bytes, optional=optional)
    except RequestRefused as refused:
        if refused.status != 400:
            raise
        unknown = _UNKNOWN_FIELD.search(str(refused))
        raise RequestRefused(
            f"{refused}; {_valid_fields(kind)}",
            param=unknown.group(1) if unknown else refused.param,
        ) from refused


def _valid_fields(kind: type[msgspec.Struct]) -> str:
    """The fields of a body, with the values of fields that have a fixed set."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType), "bodies are structs"
    if not found.fields:
        return "this endpoint takes no fields"
    fields = (f"{field.encode_name}{_values_of(field.type)}" for field in found.fields)
    return "valid fields: " + ", ".join(fields)


def _values_of(kind: inspect.Type) -> str:
    values = _literals(kind)
    return f" ({' | '.join(map(str, values))})" if values else ""


def _literals(kind: inspect.Type) -> tuple[object, ...]:
    match kind:
        case inspect.LiteralType():
            return kind.values
        case inspect.ListType():
            return _literals(kind.item_type)
        case inspect.UnionType():
            return tuple(value for each in kind.types for value in _literals(each))
        case _:
            return ()
