"""Fields of the OpenAI API and of other servers that this server knows but does not support: a 400
names them.

Ignoring such a field would return something other than the client requested.
"""

from typing import Any

from msgspec import Struct

from headwater.server.errors import RequestRefused

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, [], ""),
    "bad_words_token_ids": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "custom_logit_processor": (None, ""),
    "custom_params": (None, {}),
    "documents": (None, []),
    "early_stopping": (None, False),
    "ebnf": (None, ""),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_json_object": (None, False),
    "guided_whitespace_pattern": (None, ""),
    "json_schema": (None, ""),
    "kv_transfer_params": (None, {}),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "lora_path": (None, ""),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "no_stop_trim": (None, False),
    "prediction": (None,),
    "prompt_embeds": (None, []),
    "reasoning_max_tokens": (None,),
    "regex": (None, ""),
    "return_hidden_states": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "stop_regex": (None, [], ""),
    "structural_tag": (None, ""),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "top_a": (None, 0, 0.0),
    "truncate_prompt_tokens": (None,),
    "typical_p": (None, 1, 1.0),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "web_search_options": (None,),
}
"""For each field, the values without effect; these are accepted."""


_INSTEAD = {
    "ebnf": "send structured_outputs with a grammar",
    "regex": "send structured_outputs with a regex",
    "json_schema": "send response_format with a json_schema",
    "guided_json_object": 'send response_format {"type": "json_object"}',
    "functions": "send tools",
    "function_call": "send tool_choice",
    "truncate_prompt_tokens": "shorten the prompt",
    "best_of": "send n, which returns every answer that is generated",
    "use_beam_search": "send n: the sampler keeps one path per choice",
}
"""What to send for the same effect."""


def check_supported(body: Struct) -> None:
    """Raise RequestRefused for the first unsupported field that is set."""
    for name in body.__struct_fields__:
        neutral = NEUTRAL.get(name)
        if neutral is not None and not _is_neutral(getattr(body, name), neutral):
            raise RequestRefused(
                f"{name!r} is not supported by this server; {_instead_of(name)}", param=name
            )


def _instead_of(name: str) -> str:
    instead = _INSTEAD.get(name)
    return "leave it out" if instead is None else f"{instead} instead"


def _is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    # Types are compared too: 0 == False in Python, but not in JSON.
    return any(type(value) is type(other) and value == other for other in neutral)
