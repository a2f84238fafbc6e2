"""Outputs that one client has not read yet; belongs to one event loop.

A slow reader gets the outputs of several steps joined into one, so a slow client costs only the
memory of its tokens.
"""

import asyncio

from headwater.errors import HeadwaterError
from headwater.scheduler.output import SequenceOutput
from headwater.types import RequestId


class Mailbox:
    """Outputs of one request, in order, until its last or an error."""

    def __init__(self) -> None:
        self._waiting: list[SequenceOutput] = []
        self._error: HeadwaterError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: SequenceOutput) -> None:
        """One more output."""
        self._waiting.append(output)
        self._arrived.set()

    def fail(self, error: HeadwaterError) -> None:
        """Nothing more will come; the reader gets `error` after what is here."""
        self._error = error
        self._arrived.set()

    async def take(self) -> SequenceOutput:
        """Everything that waits, as one output; waits for the first."""
        await self._arrived.wait()
        if self._waiting:
            joined = _join(self._waiting)
            self._waiting = []
            if self._error is None:
                self._arrived.clear()
            return joined
        assert self._error is not None, "woken with nothing to read"
        raise self._error


def abort_output(request_id: str) -> SequenceOutput:
    """The last output of a request that was ended from outside."""
    return SequenceOutput(
        request_id=RequestId(request_id),
        tokens=[],
        logprobs=[],
        finish_reason="abort",
        stop_token=None,
        usage=None,
    )


def _join(outputs: list[SequenceOutput]) -> SequenceOutput:
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    return SequenceOutput(
        request_id=first.request_id,
        tokens=[token for output in outputs for token in output.tokens],
        logprobs=[entry for output in outputs for entry in output.logprobs],
        finish_reason=last.finish_reason,
        stop_token=last.stop_token,
        usage=first.usage,
    )
