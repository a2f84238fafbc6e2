"""Fields of the OpenAI API that this server knows but does not support: a 400 names them.

Ignoring such a field would return something other than the client requested.
"""

from typing import Any

from msgspec import Struct

from headwater.server.errors import RequestRefused

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_logprobs": (None, False),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""For each field, the values without effect; these are accepted."""


def check_supported(body: Struct) -> None:
    """Raise RequestRefused for the first unsupported field that is set."""
    for name in body.__struct_fields__:
        neutral = NEUTRAL.get(name)
        if neutral is not None and not _is_neutral(getattr(body, name), neutral):
            raise RequestRefused(
                f"{name!r} is not supported by this server; leave it out", param=name
            )


def _is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    # Types are compared too: 0 == False in Python, but not in JSON.
    return any(type(value) is type(other) and value == other for other in neutral)
