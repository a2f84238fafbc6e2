"""The cached blocks of one instance, from its KV events. Pure.

A view belongs to one epoch (one start) of an instance. It is exact while every batch was applied
in order. A gap makes it degraded until a replay or a snapshot has closed it.
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
    """The result of one event batch."""

    APPLIED = auto()
    KNOWN = auto()
    """The batch was applied before."""

    GAP = auto()
    """Batches before this one are missing. This batch was not applied; the view is degraded."""


class BlockView:
    """Block hashes of one instance epoch, and the media each block is in."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.next = 0
        """Sequence number of the next batch to apply."""
        self.trust = Trust.FALLBACK
        """FALLBACK until the first batch."""
        self._media: dict[int, int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in at least one medium."""
        return len(self._media)

    def apply(self, sequence: int, batch: EventBatch) -> EventBatchResult:
        """Apply a published batch if it is the next one; the view is exact then."""
        if sequence < self.next:
            if not sequence:
                self.degrade()  # numbers start at 0 again: the instance was restarted
            return EventBatchResult.KNOWN
        if sequence > self.next:
            self.degrade()
            return EventBatchResult.GAP
        self._apply(batch)
        self.next = sequence + 1
        self.trust = Trust.EXACT
        return EventBatchResult.APPLIED

    def apply_replayed(self, sequence: int, batch: EventBatch) -> EventBatchResult:
        """Apply a batch of a replay: the next one, or a snapshot. A snapshot begins with
        AllBlocksCleared and is applied whatever its number."""
        is_snapshot = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        if sequence > self.next and is_snapshot:
            self.next = sequence
        return self.apply(sequence, batch)

    def degrade(self) -> None:
        """Mark an exact view as degraded: batches are missing or late."""
        if self.trust is Trust.EXACT:
            self.trust = Trust.DEGRADED

    def confirm(self) -> None:
        """Mark the view as exact: a replay has ended, and every batch up to now is applied."""
        if self.next:
            self.trust = Trust.EXACT

    def match(self, hashes: Sequence[int]) -> int:
        """Number of leading blocks of a path that are cached in any medium."""
        media = self._media
        return next((at for at, known in enumerate(hashes) if known not in media), len(hashes))

    def blocks(self, medium: Medium) -> set[int]:
        """The hashes in one medium. O(all blocks)."""
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
