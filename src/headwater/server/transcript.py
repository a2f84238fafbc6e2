"""What the choices of one request came to, for an answer that is sent in one piece."""

from dataclasses import dataclass, field

from headwater.scheduler.output import TokenLogprobs
from headwater.server.errors import RequestRefused
from headwater.server.generation import Delta, Generation


@dataclass(slots=True)
class Transcript:
    """One choice, whole."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def transcribe(generation: Generation, num_sequences: int) -> list[Transcript]:
    """Run to the end; every choice's whole text. Raises Refused if one was ended early."""
    transcripts = [Transcript() for _ in range(num_sequences)]

    async def land(delta: Delta) -> None:
        entry = transcripts[delta.index]
        entry.pieces.append(delta.text)
        entry.tokens += delta.tokens
        entry.logprobs += delta.logprobs
        entry.finish_reason, entry.stop_reason = delta.finish_reason, delta.stop_reason

    await generation.run(land)
    reasons = {entry.finish_reason for entry in transcripts}
    if "abort" in reasons:
        raise RequestRefused("the request was aborted", status=499, code="aborted")
    if "returned" in reasons:
        raise RequestRefused("there is no room to go on here", status=503, code="returned")
    return transcripts
