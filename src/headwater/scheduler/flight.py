"""A step between its scheduling and its collection."""

from typing import NamedTuple

from headwater.scheduler.batch import Chunk
from headwater.scheduler.sequence import Sequence


class InFlightStep(NamedTuple):
    """Whose rows a scheduled step has, in the order of the batch: decodes, then chunks."""

    step: int
    decodes: list[Sequence]
    chunks: list[Chunk]
    choosing: list[bool]
    """For each chunk, whether its sequence chooses a token."""

    def has(self, sequence: Sequence) -> bool:
        """Whether `sequence` has a row. O(rows)."""
        return sequence in self.decodes or any(c.sequence is sequence for c in self.chunks)
