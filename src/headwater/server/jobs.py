"""From a request's fields to a `GenerationJob`: what completions and chat do the same."""

from collections.abc import Sequence

from headwater.server import params
from headwater.server.generation import GenerationJob, GenerationPrompt
from headwater.server.schema import Sampling
from headwater.server.service import Service
from headwater.types import Tokens


def job_of(
    service: Service,
    body: Sampling,
    name: str,
    prompts: Sequence[Tokens],
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
) -> GenerationJob:
    """Every bound checked. `default_max_tokens` None is as many as fit."""
    limits, info = service.config.limits, service.engine.info

    def prompt_of(tokens: Tokens) -> GenerationPrompt:
        params.check_prompt(tokens, info)
        sampling = params.sampling_params(
            body,
            max_tokens=params.max_tokens(
                max_tokens, len(tokens), info, default=default_max_tokens
            ),
            logprobs=logprobs,
            limits=limits,
            info=info,
        )
        return GenerationPrompt(tokens=tokens, params=sampling)

    return GenerationJob(
        name=name,
        prompts=[prompt_of(tokens) for tokens in prompts],
        num_choices=params.num_choices(body, limits),
        stops=params.stop_strings(body, limits),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=params.priority(body, service.engine_config),
        cache_salt=body.cache_salt or "",
        session_id=body.session_id or "",
        cache_hint=params.cache_hint(body),
        wants_cache_details=bool(body.cache_details),
        load_policy=body.load_policy,
        load_timeout_s=body.load_timeout_s,
    )
