"""Reads and validates the arguments of the offline engine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headwater.engine.structured import StructuredOutput
from headwater.engine.tokenizer import check_text
from headwater.errors import RequestError
from headwater.scheduler.request import SamplingParams, is_whole
from headwater.types import Tokens

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_NO_PROMPT = "a prompt must be text or a list of token ids"
_NO_CONVERSATION = "a conversation must be a list of messages with a role and content"


def read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A batch of prompts. A single prompt, text or a flat list of ids, is a batch of one."""
    if not isinstance(prompts, Sequence | np.ndarray):
        raise RequestError(
            f"prompts must be text, token ids, or a list of either, got {_kind(prompts)}"
        )
    if isinstance(prompts, str) or (len(prompts) > 0 and _is_single(prompts[0])):
        return [prompts]  # type: ignore[list-item]  # a text or a flat list, as just seen
    return list(prompts)  # type: ignore[arg-type]  # several, as just seen


def read_ids(prompt: Sequence[int], vocab_size: int) -> Tokens:
    """Token ids as the array that the tree uses. Raises RequestError for ids that the model
    does not have."""
    if len(prompt) == 0:
        return np.empty(0, dtype=np.int32)
    try:
        ids = np.asarray(prompt)
    except ValueError as exc:
        raise RequestError(_NO_PROMPT) from exc
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise RequestError(_NO_PROMPT)
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise RequestError(
            f"a token id must be at least 0 and below {vocab_size}, the size of the vocabulary, "
            f"got {wrong}"
        )
    return ids.astype(np.int32)


def read_conversations(conversations: Messages | Sequence[Messages]) -> list[Messages]:
    """A batch; a single conversation is a batch of one."""
    if not isinstance(conversations, Sequence):
        raise RequestError(
            f"conversations must be lists of messages, got {_kind(conversations)}"
        )
    one = len(conversations) > 0 and isinstance(conversations[0], Mapping)
    batch: list[Any] = [conversations] if one else list(conversations)
    for messages in batch:
        if not _is_conversation(messages):
            raise RequestError(_NO_CONVERSATION)
    return batch


def read_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings; one alone need not be in a list."""
    if not isinstance(stop, Sequence):
        raise RequestError(f"stop must be a string or a list of strings, got {_kind(stop)}")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str):
            raise RequestError(
                f"stop must be a string or a list of strings; one of them is {_kind(text)}"
            )
        check_text("stop", text)
    if not all(stops):
        raise RequestError("a stop string is empty; leave it out")
    return stops


def read_salt(cache_salt: str) -> str:
    """The cache salt: it names the tenant whose blocks may be found."""
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be a string, got {_kind(cache_salt)}")
    check_text("cache_salt", cache_salt)
    return cache_salt


def read_count(n: int) -> int:
    """The number of answers to each prompt."""
    if not is_whole(n) or n < 1:
        raise RequestError(f"n must be a whole number of at least 1, got {n!r}")
    return n


def read_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    structured: StructuredOutput | None = None,
) -> list[SamplingParams]:
    """Sampling parameters for each of `count` prompts, from one value for all or one for each;
    with the grammar of `structured` if given."""
    if structured is not None:
        grammar = structured.to_grammar()
        return [replace(one, grammar=grammar) for one in read_params(params, count)]
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not _are_params(params):
        raise RequestError(
            f"params must be SamplingParams or a list of them, got {_kind(params)}"
        )
    if len(params) != count:
        raise RequestError(
            f"params has {len(params)} entries for {count} prompts; give one each"
        )
    return list(params)


def _is_single(entry: object) -> bool:
    """Whether this is one token of a prompt and not a prompt."""
    return not isinstance(entry, str | Sequence | np.ndarray)


def _is_message(entry: object) -> bool:
    return isinstance(entry, Mapping) and "role" in entry and "content" in entry


def _is_conversation(messages: object) -> bool:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return False
    return all(_is_message(entry) for entry in messages)


def _are_params(params: object) -> bool:
    if not isinstance(params, Sequence):
        return False
    return all(isinstance(one, SamplingParams) for one in params)


def _kind(value: object) -> str:
    """A description of the given value, for an error message."""
    return f"{type(value).__name__} {value!r:.40}"
