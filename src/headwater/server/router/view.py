"""What one instance has cached, as its KV events told it; never guessed.

Pure. A view belongs to one life (epoch) of an instance. It is exact while every batch was
applied in order; a gap makes it degraded until a replay or a snapshot has closed it.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import assert_never

from headwater.disagg.routing import Trust
from headwater.metrics.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Medium,
)

_BITS: dict[Medium, int] = {"GPU": 1, "CPU": 2, "STORAGE": 4}


class EventBatchResult(Enum):
    """What came of one batch."""

    APPLIED = auto()
    KNOWN = auto()
    """It was applied before."""

    GAP = auto()
    """Batches before it are missing; nothing was changed but the trust."""


class BlockView:
    """The blocks of one life of an instance: hashes, and the media each is in."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.next = 0
        """Sequence number of the first batch that was not applied."""
        self.trust = Trust.FALLBACK
        """Until the first batch nothing is known."""
        self._media: dict[int, int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in at least one medium."""
        return len(self._media)

    def hear(self, sequence: int, batch: EventBatch) -> EventBatchResult:
        """A batch as it was published: applied when it is the next, and then the view is exact."""
        if sequence < self.next:
            if not sequence:
                self.doubt()  # it counts from the beginning again: another life has begun
            return EventBatchResult.KNOWN
        if sequence > self.next:
            self.doubt()
            return EventBatchResult.GAP
        self._apply(batch)
        self.next = sequence + 1
        self.trust = Trust.EXACT
        return EventBatchResult.APPLIED

    def replay(self, sequence: int, batch: EventBatch) -> EventBatchResult:
        """A batch that was asked for: the next one, or a snapshot, whose first event clears
        all that came before it, whatever its number."""
        is_snapshot = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        if sequence > self.next and is_snapshot:
            self.next = sequence
        return self.hear(sequence, batch)

    def doubt(self) -> None:
        """Something is missing or late; an empty view is not believed any less."""
        if self.trust is Trust.EXACT:
            self.trust = Trust.DEGRADED

    def assure(self) -> None:
        """A replay had nothing more to tell: all that was heard is all there is."""
        if self.next:
            self.trust = Trust.EXACT

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading blocks of a path are in some medium."""
        media = self._media
        return next((at for at, known in enumerate(hashes) if known not in media), len(hashes))

    def blocks(self, medium: Medium) -> set[int]:
        """The hashes in one medium. O(everything)."""
        bit = _BITS[medium]
        return {known for known, media in self._media.items() if media & bit}

    def _apply(self, batch: EventBatch) -> None:
        media = self._media
        for event in batch.events:
            match event:
                case BlockStored():
                    bit = _BITS[event.medium]
                    for known in event.block_hashes:
                        media[known] = media.get(known, 0) | bit
                case BlockRemoved():
                    self._remove(event.block_hashes, _BITS[event.medium])
                case AllBlocksCleared():
                    media.clear()
                case _:
                    assert_never(event)

    def _remove(self, hashes: Sequence[int], bit: int) -> None:
        for known in hashes:
            left = self._media.get(known, 0) & ~bit
            if left:
                self._media[known] = left
            else:
                self._media.pop(known, None)
