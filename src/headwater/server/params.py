"""Converts request fields to `SamplingParams` and checks the limits that depend on settings."""

import secrets
from collections.abc import Sequence

from headwater.cache import Hint
from headwater.config import EngineConfig
from headwater.engine.client import EngineInfo
from headwater.errors import PromptTooLong
from headwater.scheduler.request import SEED_RANGE, SamplingParams
from headwater.server.config import LimitsConfig
from headwater.server.errors import RequestRefused
from headwater.server.schema import ReturnsIn, Sampling
from headwater.server.session import session_name
from headwater.types import Tokens


def stop_strings(body: Sampling, limits: LimitsConfig) -> tuple[str, ...]:
    """The requested stop strings; none is empty."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > limits.max_stop_strings:
        raise RequestRefused(
            f"stop has {len(stops)} strings; the limit is {limits.max_stop_strings}",
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
        raise RequestRefused(f"n is {wanted}; the limit is {limits.max_choices}", param="n")
    return wanted


def num_logprobs(wanted: int | None, limits: LimitsConfig, *, param: str) -> int | None:
    """Number of alternatives reported per token; None without log-probabilities."""
    if wanted is not None and wanted > limits.max_logprobs:
        raise RequestRefused(
            f"{param} is {wanted}; the limit is {limits.max_logprobs}", param=param
        )
    return wanted


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
            f"token id {highest} is out of range; the vocabulary has {info.vocab_size} ids",
            param=param,
        )


def max_tokens(
    wanted: int | None, prompt_tokens: int, info: EngineInfo, *, default: int | None
) -> int:
    """Most tokens to generate. With `default` None, as many as fit."""
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
            f"logit_bias has {len(bias)} entries; the limit is {limits.max_logit_bias}",
            param="logit_bias",
        )
    return {_bias_token(key, info): value for key, value in bias.items()}


def _bias_token(key: str, info: EngineInfo) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < info.vocab_size):
        raise RequestRefused(
            f"logit_bias has the key {key[:40]!r}, which is not a token id of this model",
            param="logit_bias",
        )
    return int(key)


def _stop_token_ids(
    ids: Sequence[int], limits: LimitsConfig, info: EngineInfo
) -> tuple[int, ...]:
    if len(ids) > limits.max_stop_token_ids:
        raise RequestRefused(
            f"stop_token_ids has {len(ids)} ids; the limit is {limits.max_stop_token_ids}",
            param="stop_token_ids",
        )
    for token in ids:
        check_token_ids(token, info, param="stop_token_ids")
    return tuple(ids)
