"""Limits on long bodies, checked in the worker process that parses them.

What passes here is cheap for the event loop: few values to decode, and only prompts are long.
"""

import re
from typing import Any, TypeVar

import msgspec

from headwater.server.body import decode_json
from headwater.server.errors import RequestRefused
from headwater.server.responses_schema import ResponsesRequest
from headwater.server.schema import ChatRequest, TokenizeRequest

_MAX_VALUES = 200_000
"""Maximum number of JSON values of a long body, not counting its token ids."""

MAX_FIELD_BYTES = 1 << 21
"""Maximum number of bytes of a field that is not a prompt, such as `tools`: its JSON is read
and written in single calls, which hold the interpreter lock for about 5 ms per MiB."""

_PROMPT_FIELDS = frozenset(
    {"continue_choices", "input", "instructions", "messages", "prompt", "system", "tokens"}
)

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.S)
"""A string, or the rest of the body when its end is missing: a search never runs twice over the
same bytes."""

S = TypeVar("S", bound=msgspec.Struct)


def decode_long_json(raw: bytes, kind: type[S]) -> S:
    """A long JSON body as `kind`. Raises RequestRefused when it is wrong or above a limit."""
    # Parsing lists and objects is slow: millions of them take many seconds.
    if _num_containers(raw) > _MAX_VALUES:
        raise _too_many()
    body = decode_json(raw, kind)
    _check_fields(body)
    if _num_values(msgspec.to_builtins(body)) + _num_argument_values(body) > _MAX_VALUES:
        raise _too_many()
    return body


def _num_containers(raw: bytes) -> int:
    bare = _STRING.sub(b"", raw)
    return bare.count(b"[") + bare.count(b"{")


def _check_fields(body: msgspec.Struct) -> None:
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if name in _PROMPT_FIELDS or value is None:
            continue
        size = len(msgspec.msgpack.encode(value))
        if size > MAX_FIELD_BYTES:
            raise RequestRefused(
                f"{name} has {size} bytes; the limit is {MAX_FIELD_BYTES}. Send a shorter value",
                param=name,
            )


def _num_values(value: Any) -> int:  # noqa: ANN401 -- JSON
    """Number of JSON values, token ids left out; counting stops soon after `_MAX_VALUES`."""
    count, todo = 0, [value]
    while todo and count <= _MAX_VALUES:
        entry = todo.pop()
        count += 1
        if isinstance(entry, dict):
            todo += entry.values()
        elif isinstance(entry, list):
            todo += [inner for inner in entry if type(inner) is not int]
    return count


def _num_argument_values(body: msgspec.Struct) -> int:
    """Values inside the arguments of calls, which are JSON as text and read with the prompt."""
    texts: list[str] = []
    if isinstance(body, ResponsesRequest) and not isinstance(body.input, str):
        texts = [item.arguments for item in body.input if item.arguments]
    if isinstance(body, ChatRequest | TokenizeRequest):
        calls = [call for entry in body.messages or () for call in entry.tool_calls or ()]
        texts = [call.function.arguments for call in calls]
    bare = [_STRING.sub(b"", text.encode(errors="replace")) for text in texts]
    return sum(text.count(sign) for text in bare for sign in (b"[", b"{", b","))


def _too_many() -> RequestRefused:
    return RequestRefused(
        f"the body has more than {_MAX_VALUES} values in addition to token ids; send a smaller one"
    )
