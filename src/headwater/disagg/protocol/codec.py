"""Encoding of control messages: JSON with a fixed set of typed fields, then raw token ids.

    body   json bytes 4 · json · tokens as little-endian int32 (in a Start only)

A field that is missing, unknown or of the wrong type makes the message `Malformed`. Decoding
never guesses a value and creates only objects of the types listed here.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from headwater.disagg.protocol import messages
from headwater.disagg.protocol.errors import Malformed
from headwater.disagg.protocol.messages import First, Message, Reason, Start, Timings
from headwater.errors import RequestError
from headwater.scheduler.request import Request, SamplingParams, TokenLogprobs, Usage
from headwater.types import RequestId

MAX_BODY_BYTES = 32 << 20
"""Longest message: four million tokens and their fields."""

MAX_JSON_BYTES = 16 << 20
"""Enough for the longest grammar: one of forced tool calls has schemas of at most 1 MiB of
characters, and an escaped character has at most 12 bytes."""

_MAX_TEXT = 4096
_LENGTH = struct.Struct("<I")
_TOKENS = np.dtype("<i4")

Json = Any
T = TypeVar("T")


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    tokens = b""
    if isinstance(message, Start):
        tokens = message.request.tokens.astype(_TOKENS, copy=False).tobytes()
    shape = {"kind": type(message).__name__, **_WRITERS[type(message)](message)}
    text = json.dumps(shape, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text + tokens


def decode(body: bytes) -> Message:
    """The message. Raises Malformed if the bytes are not one."""
    if len(body) < _LENGTH.size:
        raise Malformed(f"message of {len(body)} bytes is too short")
    (json_bytes,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + json_bytes
    if json_bytes > MAX_JSON_BYTES or end > len(body):
        raise Malformed(f"message length {json_bytes} is wrong")
    shape = load_object(body[_LENGTH.size : end])
    kind, tokens = shape.pop("kind", None), body[end:]
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise Malformed("message of an unknown kind")
    if tokens and kind != "Start":
        raise Malformed(f"{kind} must not carry tokens")
    try:
        return read(shape, tokens)
    except (RequestError, ValueError, TypeError, OverflowError) as exc:
        raise Malformed(f"invalid {kind}: {exc}") from exc


def load_object(text: bytes) -> dict[str, Json]:
    """A JSON object. Raises Malformed if the bytes are not one."""
    try:
        shape = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise Malformed("message is not JSON") from exc
    if not isinstance(shape, dict):
        raise Malformed("message is not a JSON object")
    return shape


class _Shape:
    """Fields of one message, each taken once. Fields that are left over are an error."""

    def __init__(self, shape: Json) -> None:
        if not isinstance(shape, dict):
            raise ValueError("not an object")
        self._left = dict(shape)

    def take(self, name: str, kind: Callable[[Json], T]) -> T:
        if name not in self._left:
            raise ValueError(f"{name} is missing")
        return kind(self._left.pop(name))

    def end(self) -> None:
        if self._left:
            raise ValueError(f"unknown fields: {', '.join(sorted(self._left))[:200]}")


def _integer(value: Json) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError("not an integer")
    return value


def _count(value: Json) -> int:
    if _integer(value) < 0:
        raise ValueError("negative count")
    return int(value)


def _number(value: Json) -> float:
    if type(value) not in (int, float) or math.isnan(value):
        raise ValueError("not a number")
    return float(value)


def _seconds(value: Json) -> float:
    if not math.isfinite(_number(value)):
        raise ValueError("not a finite time")
    return float(value)


def _text(value: Json) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"not a string of at most {_MAX_TEXT} characters")
    return value


def _grammar(value: Json) -> str:
    """Only `MAX_JSON_BYTES` limits it: a schema is much longer than other texts."""
    if not isinstance(value, str):
        raise ValueError("not a string")
    return value


def _flag(value: Json) -> bool:
    if not isinstance(value, bool):
        raise ValueError("not a boolean")
    return value


def _reason(value: Json) -> Reason:
    return Reason(_text(value))


def _optional(kind: Callable[[Json], T]) -> Callable[[Json], T | None]:
    return lambda value: None if value is None else kind(value)


def _many(kind: Callable[[Json], T]) -> Callable[[Json], tuple[T, ...]]:
    def read(value: Json) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError("not a list")
        return tuple(kind(entry) for entry in value)

    return read


def _mapping(kind: Callable[[Json], T]) -> Callable[[Json], dict[str, T]]:
    def read(value: Json) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return {_text(name): kind(entry) for name, entry in value.items()}

    return read


_PARAMS: Mapping[str, Callable[[Json], object]] = {
    "max_tokens": _count,
    "min_tokens": _count,
    "temperature": _number,
    "top_p": _number,
    "top_k": _count,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": lambda value: {int(k): v for k, v in _mapping(_number)(value).items()},
    "seed": _integer,
    "logprobs": _optional(_count),
    "prompt_logprobs": _optional(_count),
    "stop_token_ids": _many(_integer),
    "ignore_eos": _flag,
    "grammar": _grammar,
}
_PLAIN: Mapping[str, Callable[[Json], object]] = {
    "handoff": _count,
    "sent_s": _seconds,
    "reason": _reason,
    "start_block": _count,
    "num_blocks": _count,
    "num_bytes": _count,
    "term_s": _seconds,
    "link": _text,
}


def _read_params(value: Json) -> SamplingParams:
    shape = _Shape(value)
    params: dict[str, Any] = {name: shape.take(name, kind) for name, kind in _PARAMS.items()}
    shape.end()
    return SamplingParams(**params)


def _read_start(value: Json, tokens: bytes) -> Start:
    if len(tokens) % _TOKENS.itemsize:
        raise ValueError(f"{len(tokens)} bytes are not a whole number of tokens")
    shape = _Shape(value)
    request = Request(
        request_id=RequestId(shape.take("request_id", _text)),
        tokens=np.frombuffer(tokens, dtype=_TOKENS),
        params=shape.take("params", _read_params),
        arrival_s=0.0,
        priority=shape.take("priority", _integer),
        cache_salt=shape.take("cache_salt", _text),
        num_resumed_tokens=shape.take("num_resumed_tokens", _count),
    )
    start = Start(
        handoff=shape.take("handoff", _count),
        request=request,
        link=shape.take("link", _text),
        num_found=shape.take("num_found", _count),
        within_s=shape.take("within_s", _seconds),
    )
    shape.end()
    return start


def _write_start(start: Start) -> dict[str, Json]:
    request = start.request
    params = {name: getattr(request.params, name) for name in _PARAMS}
    return {
        "handoff": start.handoff,
        "request_id": request.request_id,
        "params": {**params, "logit_bias": dict(request.params.logit_bias)},
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "num_resumed_tokens": request.num_resumed_tokens,
        "link": start.link,
        "num_found": start.num_found,
        "within_s": start.within_s,
    }


def _read_logprobs(value: Json) -> TokenLogprobs:
    shape = _Shape(value)
    logprobs = TokenLogprobs(
        chosen=shape.take("chosen", _number),
        rank=shape.take("rank", _count),
        top_ids=shape.take("top_ids", _many(_integer)),
        top_values=shape.take("top_values", _many(_number)),
    )
    shape.end()
    return logprobs


def _read_usage(value: Json) -> Usage:
    shape = _Shape(value)
    usage = Usage(
        prompt_tokens=shape.take("prompt_tokens", _count),
        cached_tokens=shape.take("cached_tokens", _count),
        by_tier=shape.take("by_tier", _mapping(_count)),
        computed=shape.take("computed", _count),
        miss_reason=shape.take("miss_reason", _optional(_text)),
        queued_s=shape.take("queued_s", _seconds),
    )
    shape.end()
    return usage


def _read_timings(value: Json) -> Timings:
    shape = _Shape(value)
    timings = Timings(
        **{field.name: shape.take(field.name, _seconds) for field in fields(Timings)}
    )
    shape.end()
    return timings


def _read_first(value: Json, _: bytes) -> First:
    shape = _Shape(value)
    first = First(
        handoff=shape.take("handoff", _count),
        token=shape.take("token", _count),
        logprobs=shape.take("logprobs", _optional(_read_logprobs)),
        usage=shape.take("usage", _read_usage),
        num_blocks=shape.take("num_blocks", _count),
        num_bytes=shape.take("num_bytes", _count),
        timings=shape.take("timings", _read_timings),
    )
    shape.end()
    return first


def _write_first(first: First) -> dict[str, Json]:
    usage, logprobs = first.usage, first.logprobs
    return {
        "handoff": first.handoff,
        "token": first.token,
        "logprobs": None if logprobs is None else _values(logprobs),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "by_tier": dict(usage.by_tier),
            "computed": usage.computed,
            "miss_reason": usage.miss_reason,
            "queued_s": usage.queued_s,
        },
        "num_blocks": first.num_blocks,
        "num_bytes": first.num_bytes,
        "timings": _values(first.timings),
    }


def _values(value: Any) -> dict[str, Json]:  # noqa: ANN401 -- any of our dataclasses
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _plain_reader(kind: type) -> Callable[[Json, bytes], Any]:
    def read(value: Json, _: bytes) -> Any:  # noqa: ANN401 -- an instance of `kind`
        shape = _Shape(value)
        taken = {
            field.name: shape.take(field.name, _PLAIN[field.name]) for field in fields(kind)
        }
        shape.end()
        return kind(**taken)

    return read


_PLAIN_KINDS = (
    messages.Accepted,
    messages.StartRefused,
    messages.Ask,
    messages.Grant,
    messages.Refuse,
    messages.Renew,
    messages.Renewed,
    messages.HandoffDone,
    messages.Cancel,
    messages.Failed,
    messages.Pull,
    messages.Pulled,
)
_READERS: dict[str, Callable[[Json, bytes], Message]] = {
    "Start": _read_start,
    "First": _read_first,
    **{kind.__name__: _plain_reader(kind) for kind in _PLAIN_KINDS},
}
_WRITERS: dict[type, Callable[[Any], dict[str, Json]]] = {
    Start: _write_start,
    First: _write_first,
    **dict.fromkeys(_PLAIN_KINDS, _values),
}
