"""What one step may still compute."""

from headwater.scheduler.batch import Chunk
from headwater.scheduler.sequence import Sequence


class StepBudget:
    """Tokens left in the step being scheduled, and places left for new sequences."""

    __slots__ = ("_max_chunk", "num_places", "num_tokens")

    def __init__(
        self, *, num_tokens: int, num_places: int, max_chunk: int | None = None
    ) -> None:
        self.num_tokens = num_tokens
        self.num_places = num_places
        self._max_chunk = max_chunk or num_tokens

    @property
    def has_room(self) -> bool:
        """Whether one more sequence could start and compute at least one token."""
        return self.num_tokens > 0 and self.num_places > 0

    def spend_place(self) -> None:
        """A new sequence runs from now on."""
        self.num_places -= 1

    def spend_chunk(self, sequence: Sequence) -> Chunk:
        """As much of a prefill as the step has tokens for; at least one must be left."""
        left = sequence.num_tokens - sequence.num_scheduled
        num_tokens = min(left, self.num_tokens, self._max_chunk)
        self.num_tokens -= num_tokens
        return Chunk(sequence, num_tokens)
