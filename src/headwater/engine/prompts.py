"""What callers of the offline engine hand over, read once and refused where it makes no sense."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headwater.errors import RequestError
from headwater.types import Tokens

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_NO_PROMPT = "a prompt is text or a list of token ids"


def read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A batch; a single prompt, text or a flat list of ids, is a batch of one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and _is_single(prompts[0])):
        return [prompts]  # type: ignore[list-item]  # a text or a flat list, as just seen
    return list(prompts)  # type: ignore[arg-type]  # several, as just seen


def read_ids(prompt: Sequence[int], vocab_size: int) -> Tokens:
    """Token ids as the array that travels to the tree; raises for what is none of the model's."""
    if len(prompt) == 0:
        return np.empty(0, dtype=np.int32)
    try:
        ids = np.asarray(prompt)
    except ValueError as exc:
        raise RequestError(_NO_PROMPT) from exc
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise RequestError(_NO_PROMPT)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise RequestError(f"a token id of this model is at least 0 and below {vocab_size}")
    return ids.astype(np.int32)


def read_conversations(conversations: Messages | Sequence[Messages]) -> list[Messages]:
    """A batch; a single conversation is a batch of one."""
    one = len(conversations) > 0 and isinstance(conversations[0], Mapping)
    batch: list[Any] = [conversations] if one else list(conversations)
    for messages in batch:
        if isinstance(messages, str) or not all(_is_message(entry) for entry in messages):
            raise RequestError("a conversation is a list of messages with a role and content")
    return batch


def read_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings; one alone need not be in a list."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stops):
        raise RequestError("a stop string is empty")
    return stops


def _is_single(entry: object) -> bool:
    """Whether this is one of a prompt's tokens, rather than a prompt."""
    return not isinstance(entry, str | Sequence | np.ndarray)


def _is_message(entry: object) -> bool:
    return isinstance(entry, Mapping) and "role" in entry and "content" in entry
