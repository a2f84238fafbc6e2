"""Log-probabilities in the two formats of the API."""

from collections.abc import Sequence
from itertools import accumulate

from headwater.engine.tokenizer import Tokenizer
from headwater.scheduler.request import TokenLogprobs
from headwater.server.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from headwater.server.generation import Delta, Transcript

_LOWEST = -9999.0
"""Written for probability 0, because JSON has no infinity."""

Entries = Sequence[TokenLogprobs | None]


def num_scored_tokens(part: Delta | Transcript) -> int:
    """Tokens of `part` that have log-probabilities, those of the prompt included."""
    scored = len(part.logprobs) if part.logprobs and part.logprobs[0] is not None else 0
    return scored + len(part.prompt_logprobs or ())


def completion_logprobs(
    tokens: Sequence[int], entries: Entries, tokenizer: Tokenizer, *, offset: int
) -> CompletionLogprobs:
    """Parallel lists; `offset` is the position of the first token's text in its choice."""
    names = [tokenizer.token_text(token) for token in tokens]
    lengths = [num_characters(tokenizer.token_bytes(token)) for token in tokens]
    offsets = list(accumulate(lengths, initial=offset))
    found = [entry for entry in entries if entry is not None]
    return CompletionLogprobs(
        tokens=names[: len(found)],
        token_logprobs=[_finite(entry.chosen) for entry in found],
        top_logprobs=[_top_by_name(entry, tokenizer) for entry in found],
        text_offset=offsets[: len(found)],
    )


def chat_logprobs(
    tokens: Sequence[int], entries: Entries, tokenizer: Tokenizer
) -> ChatLogprobs:
    """One object per token."""
    content = [
        TokenLogprob(
            token=tokenizer.token_text(token),
            logprob=_finite(entry.chosen),
            bytes=list(tokenizer.token_bytes(token)),
            top_logprobs=_top(entry, tokenizer),
        )
        for token, entry in zip(tokens, entries, strict=False)
        if entry is not None
    ]
    return ChatLogprobs(content=content)


def prompt_logprobs(
    tokens: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> PromptLogprobs:
    """One object per prompt token, and null for the first."""
    found: PromptLogprobs = [None]
    for token, entry in zip(tokens[1:], entries, strict=True):
        pairs = zip(entry.top_ids, entry.top_values, strict=True)
        by_id = {
            str(other): _prompt_logprob(other, value, rank, tokenizer)
            for rank, (other, value) in enumerate(pairs, 1)
        }
        by_id[str(token)] = _prompt_logprob(token, entry.chosen, entry.rank, tokenizer)
        found.append(by_id)
    return found


def with_prompt(
    tokens: Sequence[int],
    entries: Sequence[TokenLogprobs],
    answer: CompletionLogprobs,
    tokenizer: Tokenizer,
) -> CompletionLogprobs:
    """`answer` with the log-probabilities of the prompt before it, for `echo`."""
    first, *_ = tokens
    rest = completion_logprobs(
        tokens[1:], entries, tokenizer, offset=num_characters(tokenizer.token_bytes(first))
    )
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(first), *rest.tokens, *answer.tokens],
        token_logprobs=[None, *rest.token_logprobs, *answer.token_logprobs],
        top_logprobs=[None, *rest.top_logprobs, *answer.top_logprobs],
        text_offset=[0, *rest.text_offset, *answer.text_offset],
    )


def _prompt_logprob(token: int, value: float, rank: int, tokenizer: Tokenizer) -> PromptLogprob:
    return PromptLogprob(
        logprob=_finite(value), rank=rank, decoded_token=tokenizer.token_text(token)
    )


def num_characters(raw: bytes) -> int:
    """Number of characters that begin in these bytes: every byte except UTF-8 continuation
    bytes begins one."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def _top(entry: TokenLogprobs, tokenizer: Tokenizer) -> list[TopLogprob]:
    return [
        TopLogprob(
            token=tokenizer.token_text(token),
            logprob=_finite(value),
            bytes=list(tokenizer.token_bytes(token)),
        )
        for token, value in zip(entry.top_ids, entry.top_values, strict=True)
    ]


def _top_by_name(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    pairs = zip(entry.top_ids, entry.top_values, strict=True)
    return {tokenizer.token_text(token): _finite(value) for token, value in pairs}


def _finite(value: float) -> float:
    return max(value, _LOWEST)
