"""The largest number of prompt tokens that any cache could find in a trace."""

from collections.abc import Iterator, Sequence

from headwater.replay.trace import TraceRequest


def reusable_tokens(requests: Sequence[TraceRequest], block_tokens: int) -> Iterator[int]:
    """For each request, the leading tokens of its prompt that an earlier request contained.

    A cache without a size limit, whose blocks are available at once, finds these tokens. Whole
    blocks of `block_tokens` count, and the last token of a prompt is always computed.
    """
    seen: set[int] = set()
    for request in requests:
        leading = 0
        for block in request.hash_ids:
            if block not in seen:
                break
            leading += 1
        tokens = min(leading * request.block_tokens, max(request.input_length - 1, 0))
        yield tokens // block_tokens * block_tokens
        seen.update(request.hash_ids)
