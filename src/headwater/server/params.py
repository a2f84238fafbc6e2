"""From a request's fields to `SamplingParams`, with every bound that depends on settings."""

import secrets
from collections.abc import Sequence

from headwater.cache import Hint
from headwater.config import EngineConfig, LimitsConfig
from headwater.engine.client import EngineInfo
from headwater.errors import PromptTooLong
from headwater.scheduler.request import SEED_RANGE, SamplingParams
from headwater.server.errors import RequestRefused
from headwater.server.schema import ReturnsIn, Sampling
from headwater.types import Tokens


def stop_strings(body: Sampling, limits: LimitsConfig) -> tuple[str, ...]:
    """The stop strings asked for, none of them empty."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > limits.max_stop_strings:
        raise RequestRefused(
            f"at most {limits.max_stop_strings} stop strings, got {len(stops)}", param="stop"
        )
    for stop in stops:
        if not 1 <= len(stop) <= limits.max_stop_chars:
            raise RequestRefused(
                f"a stop string has 1 to {limits.max_stop_chars} characters, got {len(stop)}",
                param="stop",
            )
    return tuple(stops)


def num_choices(body: Sampling, limits: LimitsConfig) -> int:
    """How many choices each prompt gets."""
    wanted = body.n or 1
    if wanted > limits.max_choices:
        raise RequestRefused(f"n is at most {limits.max_choices}, got {wanted}", param="n")
    return wanted


def num_logprobs(wanted: int | None, limits: LimitsConfig, *, param: str) -> int | None:
    """How many alternatives are reported; None where nothing is."""
    if wanted is not None and wanted > limits.max_logprobs:
        raise RequestRefused(
            f"{param} is at most {limits.max_logprobs}, got {wanted}", param=param
        )
    return wanted


def check_prompt(tokens: Tokens, info: EngineInfo) -> None:
    """Refuse a prompt that no engine of this kind can run."""
    if len(tokens) == 0:
        raise RequestRefused("the prompt is empty", param="prompt")
    if len(tokens) >= info.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(tokens)} tokens; with at least one more it may have "
            f"{info.max_model_len}"
        )
    if int(tokens.max()) >= info.vocab_size:
        raise RequestRefused(
            f"token id {int(tokens.max())} is not below the vocabulary's {info.vocab_size}",
            param="prompt",
        )


def max_tokens(
    wanted: int | None, prompt_tokens: int, info: EngineInfo, *, default: int | None
) -> int:
    """Most tokens to generate. `default` None is as many as fit."""
    room = info.max_model_len - prompt_tokens
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise PromptTooLong(
            f"{prompt_tokens} prompt tokens and {wanted} of output are more than the "
            f"{info.max_model_len} that one request may have"
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
    """How tokens are chosen; the seed is that of the first choice."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestRefused(
            f"min_tokens {min_tokens} is more than the {max_tokens} that may be generated",
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
    """What the client says of its session."""
    wanted = body.cache_hint
    if wanted is None:
        return None
    if body.session_id is None:
        raise RequestRefused(
            "cache_hint says something of a session: give session_id", param="cache_hint"
        )
    if isinstance(wanted, ReturnsIn):
        return Hint(returns_in_s=wanted.returns_in_s)
    return Hint(closed=wanted == "closed")


def priority(body: Sampling, engine: EngineConfig | None) -> int:
    """The request's class; asking for one where nobody looks at it is refused."""
    wanted = body.priority or 0
    if wanted and engine is not None and engine.scheduling_policy != "priority":
        raise RequestRefused(
            f"priority {wanted} would change nothing: this server was started with "
            f"--scheduling-policy {engine.scheduling_policy}, not priority",
            param="priority",
        )
    return wanted


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(body: Sampling, limits: LimitsConfig, info: EngineInfo) -> dict[int, float]:
    bias = body.logit_bias or {}
    if len(bias) > limits.max_logit_bias:
        raise RequestRefused(
            f"at most {limits.max_logit_bias} entries, got {len(bias)}", param="logit_bias"
        )
    return {_bias_token(key, info): value for key, value in bias.items()}


def _bias_token(key: str, info: EngineInfo) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < info.vocab_size):
        raise RequestRefused(
            f"{key[:40]!r} is not a token id of this model", param="logit_bias"
        )
    return int(key)


def _stop_token_ids(
    ids: Sequence[int], limits: LimitsConfig, info: EngineInfo
) -> tuple[int, ...]:
    if len(ids) > limits.max_stop_token_ids:
        raise RequestRefused(f"at most {limits.max_stop_token_ids} ids", param="stop_token_ids")
    for token in ids:
        if token >= info.vocab_size:
            raise RequestRefused(
                f"{token} is not a token id of this model", param="stop_token_ids"
            )
    return tuple(ids)
