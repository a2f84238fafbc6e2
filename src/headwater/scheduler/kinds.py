"""What kind of value each field of `SamplingParams` takes, for callers that no type checker
saw."""

from collections.abc import Callable, Mapping
from numbers import Integral, Real

from headwater.errors import RequestError


def is_whole(value: object) -> bool:
    """Whether this is an integer of Python's or of numpy's; true and false are none."""
    kind = type(value)
    return kind is int or (kind is not bool and isinstance(value, Integral))


def is_number(value: object) -> bool:
    """Whether this is a number that can be compared; true and false are none."""
    kind = type(value)
    return kind is float or kind is int or (kind is not bool and isinstance(value, Real))


def _is_whole_or_none(value: object) -> bool:
    return value is None or is_whole(value)


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        is_whole(token) and is_number(amount) for token, amount in value.items()
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(is_whole(token) for token in value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_Kind = tuple[Callable[[object], bool], str]
_WHOLE: _Kind = (is_whole, "a whole number")
_NUMBER: _Kind = (is_number, "a number")

_KINDS: Mapping[str, _Kind] = {
    "max_tokens": _WHOLE,
    "min_tokens": _WHOLE,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _WHOLE,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "logit_bias": (_is_bias, "numbers by token id"),
    "seed": _WHOLE,
    "logprobs": (_is_whole_or_none, "a whole number or None"),
    "stop_token_ids": (_are_ids, "a tuple of token ids"),
    "ignore_eos": (_is_bool, "True or False"),
}


def check_kinds(params: object) -> None:
    """Raise RequestError, naming the field, for the first value of another kind."""
    for name, (is_kind, words) in _KINDS.items():
        value = getattr(params, name)
        if not is_kind(value):
            raise RequestError(
                f"{name} must be {words}, got {type(value).__name__} {value!r:.40}"
            )
