"""One tier's slots: which are free, and who has the others. Arrays, never a loop over slots.

Every change names the state it expects. A slot that is in another state, or is named twice
in one batch, is a broken invariant and is found here, before anything is changed.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from headwater.errors import CacheUseError, InvariantError
from headwater.types import Slots


class SlotState(IntEnum):
    """Who has a slot. Each slot is in exactly one of these."""

    FREE = 0
    HELD = 1
    """Being filled by one sequence; not findable."""

    CACHED = 2
    """Owned by a node of the tree."""

    MOVING = 3
    """The target of a transfer in flight; not findable."""

    QUARANTINED = 4
    """The target of a transfer that timed out; its executor may still write to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """How many slots are in each state."""

    total: int
    free: int
    held: int
    cached: int
    moving: int
    quarantined: int


class SlotPool:
    """A fixed set of slots with one state each; taking and freeing n is one operation.

    Invariant: the free stack names each slot in state FREE once and no other slot, and the
    count kept for each state is the true one. `check()` verifies it.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise CacheUseError(f"a pool cannot have {num_slots} slots")
        self.num_slots = num_slots
        self.num_free = num_slots
        # Lowest slot on top, so that a fresh pool hands out 0, 1, 2, …
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int64)
        self._state = np.zeros(num_slots, dtype=np.uint8)
        # Scratch for finding a slot that is named twice in one batch, see `_require`.
        self._mark = np.zeros(num_slots, dtype=np.int64)
        self._ordinal = np.arange(num_slots, dtype=np.int64)
        self._counts = [num_slots, 0, 0, 0, 0]

    def take(self, count: int, state: SlotState = SlotState.HELD) -> Slots | None:
        """Move `count` free slots to `state`, or change nothing and return None."""
        if count < 0:
            raise CacheUseError(f"cannot take {count} slots")
        if count > self.num_free:
            return None
        top = self.num_free
        slots = self._free[top - count : top][::-1].copy()
        self._state[slots] = state
        self.num_free = top - count
        self._count(SlotState.FREE, state, count)
        return slots

    def move(self, slots: Slots, old: SlotState, new: SlotState) -> None:
        """Change the state of `slots`, all of which must be in state `old`."""
        self._require(slots, old)
        self._state[slots] = new
        self._count(old, new, len(slots))

    def free(self, slots: Slots, old: SlotState) -> None:
        """Give back `slots`, all of which must be in state `old`, in one batch."""
        self._require(slots, old)
        count = len(slots)
        self._state[slots] = SlotState.FREE
        self._free[self.num_free : self.num_free + count] = slots
        self.num_free += count
        self._count(old, SlotState.FREE, count)

    def stats(self) -> PoolStats:
        """How many slots are in each state now."""
        free, held, cached, moving, quarantined = self._counts
        return PoolStats(
            total=self.num_slots,
            free=free,
            held=held,
            cached=cached,
            moving=moving,
            quarantined=quarantined,
        )

    def owned(self, state: SlotState) -> Slots:
        """Every slot in `state`, ascending. O(slots): for checks and tests."""
        return np.flatnonzero(self._state == state)

    def check(self) -> None:
        """Raise InvariantError if the books do not balance."""
        free = self._free[: self.num_free]
        if len(np.unique(free)) != self.num_free:
            raise InvariantError("a slot is free twice")
        if not np.array_equal(np.sort(free), self.owned(SlotState.FREE)):
            raise InvariantError("the free stack and the slot states disagree")
        if np.bincount(self._state, minlength=len(SlotState)).tolist() != self._counts:
            raise InvariantError("the count of a slot state is wrong")

    def _count(self, old: SlotState, new: SlotState, count: int) -> None:
        self._counts[old] -= count
        self._counts[new] += count

    def _require(self, slots: Slots, state: SlotState) -> None:
        """Raise unless every slot exists, is in `state`, and is named once."""
        count = len(slots)
        if count == 0:
            return
        try:
            found = self._state[slots]
        except IndexError as exc:
            raise InvariantError(f"a slot is outside the pool of {self.num_slots}") from exc
        if found.tobytes().count(state) != count:
            self._explain(slots, state)
        if count > 1:
            # Two entries naming one slot leave the later ordinal in both places.
            ordinal = self._ordinal[:count]
            self._mark[slots] = ordinal
            if self._mark[slots].tobytes() != ordinal.tobytes():
                raise InvariantError("a slot is named twice in one batch")

    def _explain(self, slots: Slots, state: SlotState) -> None:
        wrong = slots[self._state[slots] != state]
        actual = SlotState(int(self._state[wrong[0]])).name
        raise InvariantError(
            f"slot {wrong[0]} is {actual}, not {state.name} ({len(wrong)} of {len(slots)} wrong)"
        )
