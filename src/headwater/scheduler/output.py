"""What a step brought for one sequence."""

from dataclasses import dataclass

from headwater.scheduler.batch import TokenLogprobs
from headwater.scheduler.usage import Usage
from headwater.types import RequestId


@dataclass(slots=True)
class SequenceOutput:
    """New tokens of one sequence. A value: built once, changed by nobody.

    Neither frozen nor keyword-only, because one is built for each sequence in each step, and
    that would take four times as long.
    """

    request_id: RequestId
    tokens: list[int]
    """Chosen since the last output; a stop token is among them."""

    logprobs: list[TokenLogprobs | None]
    """One entry a token; None where none were asked for."""

    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `refused` or `returned` on the last output, None before."""

    stop_token: int | None = None
    """The token that ended the output, where one did."""

    usage: Usage | None = None
    """On the first output that has tokens, and on no other."""

    detail: str = ""
    """Where it was refused: the reason, a word."""
