"""Outputs that wait for a slow reader."""

import asyncio

from headwater.engine.front import Mailbox
from headwater.scheduler.request import SequenceOutput, TokenLogprobs, Usage
from headwater.types import RequestId

NAME = RequestId("r")


def test_joined_outputs_lose_nothing():
    """A slow reader gets one output with all tokens, the usage and prompt log-probabilities of
    the first output, and the reason why the last one failed."""
    usage = Usage(prompt_tokens=3, cached_tokens=2, computed=1)
    scores = [TokenLogprobs(chosen=-1.0, rank=1, top_ids=(), top_values=())]
    mailbox = Mailbox()
    mailbox.put(SequenceOutput(NAME, [7], [None], usage=usage, prompt_logprobs=scores))
    mailbox.put(SequenceOutput(NAME, [8], [None]))
    mailbox.put(SequenceOutput(NAME, [], [], "failed", detail="the grammar became too complex"))

    joined = asyncio.run(mailbox.take())

    assert joined == SequenceOutput(
        NAME,
        [7, 8],
        [None, None],
        "failed",
        usage=usage,
        prompt_logprobs=scores,
        detail="the grammar became too complex",
    )
