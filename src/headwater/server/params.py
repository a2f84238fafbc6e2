"""Converts request fields to what the engine takes: sampling, session and output constraint.

Limits that depend on settings are checked here.
"""

import re
import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from headwater.cache import Hint
from headwater.config import EngineConfig
from headwater.engine.client import EngineInfo
from headwater.engine.structured import StructuredOutput
from headwater.errors import PromptTooLong, RequestError
from headwater.scheduler.request import SEED_RANGE, SamplingParams
from headwater.server.config import LimitsConfig
from headwater.server.errors import RequestRefused
from headwater.server.schema import (
    SESSION_ID,
    ChatRequest,
    Message,
    ResponseFormat,
    ReturnsIn,
    Sampling,
    StructuredFields,
    TextPart,
)
from headwater.types import Tokens

_MAX_PROMPT_LOGPROBS = 1 << 17
"""Maximum number of log-probabilities of one prompt: reading them from the engine takes 50
ms."""


def stop_strings(body: Sampling, limits: LimitsConfig) -> tuple[str, ...]:
    """The requested stop strings; none is empty."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > limits.max_stop_strings:
        raise RequestRefused(
            f"stop has {len(stops)} strings; the limit is {limits.max_stop_strings}. Send "
            f"fewer",
            param="stop",
        )
    for stop in stops:
        if not 1 <= len(stop) <= limits.max_stop_chars:
            raise RequestRefused(
                f"a stop string has {len(stop)} characters; it must have 1 to {limits.max_stop_chars}",
                param="stop",
            )
    return tuple(stops)


def num_choices(body: Sampling, limits: LimitsConfig) -> int:
    """Number of choices per prompt."""
    wanted = body.n or 1
    if wanted > limits.max_choices:
        raise RequestRefused(
            f"n is {wanted}; the limit is {limits.max_choices}. Lower n", param="n"
        )
    return wanted


def num_logprobs(wanted: int | None, limits: LimitsConfig, *, param: str) -> int | None:
    """Number of alternatives reported per token; None without log-probabilities."""
    if wanted is not None and wanted > limits.max_logprobs:
        raise RequestRefused(
            f"{param} is {wanted}; the limit is {limits.max_logprobs}. Ask for fewer",
            param=param,
        )
    return wanted


def check_prompt_logprobs(num_alternatives: int, num_tokens: int) -> None:
    """Raise for more log-probabilities of a prompt than one answer may have."""
    wanted = num_tokens * (num_alternatives + 1)
    if wanted > _MAX_PROMPT_LOGPROBS:
        raise RequestRefused(
            f"log-probabilities of {num_tokens} prompt tokens with {num_alternatives} "
            f"alternatives each are {wanted} values; the limit is {_MAX_PROMPT_LOGPROBS}. Ask "
            "for fewer alternatives or send a shorter prompt",
            param="prompt_logprobs",
        )


def check_prompt(tokens: Tokens, info: EngineInfo) -> None:
    """Raise for a prompt that is empty, too long, or has ids outside the vocabulary."""
    if len(tokens) == 0:
        raise RequestRefused("the prompt is empty; send at least one token", param="prompt")
    check_length(len(tokens), info)
    check_token_ids(int(tokens.max()), info, param="prompt")


def check_length(num_tokens: int, info: EngineInfo) -> None:
    """Raise PromptTooLong when no room is left for one output token."""
    if num_tokens >= info.max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens; the limit is {info.max_model_len} including "
            "at least one output token. Shorten the prompt"
        )


def check_token_ids(highest: int, info: EngineInfo, *, param: str) -> None:
    """Raise RequestRefused when the highest token id is not in the vocabulary."""
    if highest >= info.vocab_size:
        raise RequestRefused(
            f"token id {highest} is out of range; ids are below {info.vocab_size}, the size "
            f"of the vocabulary",
            param=param,
        )


def max_tokens(
    wanted: int | None, prompt_tokens: int, info: EngineInfo, *, default: int | None
) -> int:
    """Maximum number of tokens to generate. With `default` None, as many as fit."""
    room = info.max_model_len - prompt_tokens
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise PromptTooLong(
            f"{prompt_tokens} prompt tokens and {wanted} output tokens are over the limit of "
            f"{info.max_model_len} tokens per request; shorten the prompt or lower max_tokens"
        )
    return wanted


def sampling_params(
    body: Sampling,
    *,
    max_tokens: int,
    logprobs: int | None,
    limits: LimitsConfig,
    info: EngineInfo,
) -> SamplingParams:
    """The sampling parameters; the seed is that of the first choice."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestRefused(
            f"min_tokens is {min_tokens} and max_tokens is {max_tokens}; lower min_tokens",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body, limits, info),
        seed=secrets.randbelow(SEED_RANGE) if body.seed is None else body.seed % SEED_RANGE,
        logprobs=logprobs,
        stop_token_ids=_stop_token_ids(body.stop_token_ids or (), limits, info),
        ignore_eos=bool(body.ignore_eos),
    )


def cache_hint(body: Sampling) -> Hint | None:
    """The client's hint about its session."""
    wanted = body.cache_hint
    if wanted is None:
        return None
    if not session_name(body):
        raise RequestRefused(
            "cache_hint applies to a session; send session_id with it", param="cache_hint"
        )
    if isinstance(wanted, ReturnsIn):
        return Hint(returns_in_s=wanted.returns_in_s)
    return Hint(closed=wanted == "closed")


def priority(body: Sampling, engine: EngineConfig | None) -> int:
    """The request's priority. Raises RequestRefused when this server ignores priorities."""
    wanted = body.priority or 0
    if wanted and engine is not None and engine.scheduling_policy != "priority":
        raise RequestRefused(
            f"priority {wanted} has no effect: this server was started with "
            f"--scheduling-policy {engine.scheduling_policy}; leave priority out or start it "
            "with --scheduling-policy priority",
            param="priority",
        )
    return wanted


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(body: Sampling, limits: LimitsConfig, info: EngineInfo) -> dict[int, float]:
    bias = body.logit_bias or {}
    if len(bias) > limits.max_logit_bias:
        raise RequestRefused(
            f"logit_bias has {len(bias)} entries; the limit is {limits.max_logit_bias}. Send "
            f"fewer",
            param="logit_bias",
        )
    return {_bias_token(key, info): value for key, value in bias.items()}


def _bias_token(key: str, info: EngineInfo) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < info.vocab_size):
        raise RequestRefused(
            f"logit_bias has the key {key[:40]!r}, which is not a token id of this model; "
            f"leave it out",
            param="logit_bias",
        )
    return int(key)


def _stop_token_ids(
    ids: Sequence[int], limits: LimitsConfig, info: EngineInfo
) -> tuple[int, ...]:
    if len(ids) > limits.max_stop_token_ids:
        raise RequestRefused(
            f"stop_token_ids has {len(ids)} ids; the limit is {limits.max_stop_token_ids}. "
            f"Send fewer",
            param="stop_token_ids",
        )
    for token in ids:
        check_token_ids(token, info, param="stop_token_ids")
    return tuple(ids)


_SESSION_ID = re.compile(SESSION_ID)

_START_CHARS = 8192
"""Number of characters of a message that are read to distinguish conversations. The rest is not
read, because this runs on the event loop and a message may have megabytes."""

_MAX_START = 16
"""Number of messages, and of parts of a message, that are read for this."""


def session_name(body: Sampling) -> str:
    """The session of a request: its `session_id`, otherwise `conversation`, `prompt_cache_key`
    or `user`.

    One user has many conversations, so `user` is combined with the beginning of the chat. Empty
    if the request has none of these fields, or `user` without a chat; then the cache recognises
    the session by its prefix alone.
    """
    for name in (body.session_id, body.conversation, body.prompt_cache_key):
        if name:
            return _as_id(name)
    if body.user and isinstance(body, ChatRequest):
        return _as_id(body.user)[:200] + "/" + conversation_start(body.messages)[:16]
    return ""


def conversation_start(messages: Sequence[Message]) -> str:
    """A name for a conversation, from its beginning; the same for each of its turns."""
    digest = sha256()
    for message in messages[:_MAX_START]:
        start = (message.role, _start_of(message.content))
        digest.update(repr(start).encode(errors="replace"))
        if message.role == "user":
            break
    return digest.hexdigest()[:32]


def _start_of(content: str | list[TextPart] | None) -> str | list[str]:
    if isinstance(content, list):
        return [(part.text or "")[:_START_CHARS] for part in content[:_MAX_START]]
    return (content or "")[:_START_CHARS]


def _as_id(name: str) -> str:
    return (
        name if _SESSION_ID.match(name) else sha256(name.encode(errors="replace")).hexdigest()
    )


def structured_output(body: Sampling) -> StructuredOutput | None:
    """The constraint on the answer; None if there is none.

    Raises RequestRefused if two fields constrain the answer, or if one is invalid.
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
            f"a response can follow only one constraint; send one of {', '.join(given)}",
            param=list(given)[1],
        )
    for name, fields in given.items():
        try:
            return StructuredOutput(**fields)
        except RequestError as exc:
            raise RequestRefused(str(exc), param=name) from exc
    return None


def constraint_param(body: Sampling) -> str:
    """The name of the request field that defines the grammar, for an error about it."""
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
            "response_format of type json_schema needs the field json_schema",
            param="response_format",
        )
    return {"json": wanted.json_schema.schema}


def _of_fields(wanted: StructuredFields | None) -> _Fields | None:
    if wanted is None:
        return None
    names = ("json", "regex", "choice", "grammar", "json_object")
    return {name: getattr(wanted, name) or None for name in names if getattr(wanted, name)}


def _one(**fields: object) -> _Fields | None:
    return {k: v for k, v in fields.items() if v is not None} or None
