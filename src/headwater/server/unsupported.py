"""Fields of the API that are known here and not served: a 400 names them.

Ignoring one would give a client something else than it asked for. A field moves out of this
table on the day it works.
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
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_logprobs": (None, False),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""By field: the values that ask for nothing, and so are accepted."""


def check_supported(body: Struct) -> None:
    """Raise for the first field that asks for something not served."""
    for name in body.__struct_fields__:
        neutral = NEUTRAL.get(name)
        if neutral is not None and not _is_neutral(getattr(body, name), neutral):
            raise RequestRefused(f"{name!r} is not supported by this server", param=name)


def _is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    # Compared with their types: in Python, but not in JSON, 0 equals false.
    return any(type(value) is type(other) and value == other for other in neutral)
