"""One tier's slots: which are free, and who has the others. Arrays, never a loop over slots.

Every change names the state it expects. A slot that is in another state, or is named twice
in one batch, is a broken invariant and is found here, before anything is changed.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from headwater.errors import CacheUseError, InvariantError
from headwater.types import EMPTY, Slots


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


_FREE = SlotState.FREE
_BYTE = [bytes([state]) for state in SlotState]
"""Each state as the byte it is in an array of states."""

_FEW = 8
"""Up to this many slots are compared as a set, which is then the faster way."""

_OUTSIDE = 255
"""No state: what an index that is not a slot finds."""


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
        self._free = np.arange(num_slots, dtype=np.int64)
        # Twice as long: indices from the end, which numpy would take, meet no state at all.
        self._state = np.full(2 * num_slots, _OUTSIDE, dtype=np.uint8)
        self._state[:num_slots] = SlotState.FREE
        # Scratch for finding a slot that is named twice in one batch.
        self._mark = np.zeros(num_slots, dtype=np.int32)
        self._ordinal = np.arange(num_slots, dtype=np.int32)
        self._ordinals = self._ordinal.tobytes()
        self._counts = [num_slots, 0, 0, 0, 0]

    def take(self, count: int, state: SlotState = SlotState.HELD) -> Slots | None:
        """Move `count` free slots to `state`, or change nothing and return None."""
        if count < 0:
            raise CacheUseError(f"cannot take {count} slots")
        top = self.num_free
        if count > top:
            return None
        if not count:
            return EMPTY
        slots = self._free[top - count : top].copy()
        self._state[slots] = state
        self.num_free = top - count
        self._counts[_FREE] -= count
        self._counts[state] += count
        return slots

    def move(self, slots: Slots, old: SlotState, new: SlotState) -> None:
        """Change the state of `slots`, all of which must be in state `old`."""
        count = len(slots)
        self._require(slots, count, old)
        self._state[slots] = new
        self._counts[old] -= count
        self._counts[new] += count

    def reuse(self, parts: list[Slots], old: SlotState, new: SlotState) -> Slots:
        """Free the slots of `parts`, all in state `old`, and take these and all free ones.

        What an eviction needs: the slots go from one owner to the next in one batch. Both
        those of the tree and those of the free stack were checked for twins as they went in.
        """
        num_free = self.num_free
        if num_free:
            parts = [self._free[:num_free], *parts]
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        total = len(slots)
        evicted = slots[num_free:] if num_free else slots
        if self._state[evicted].tobytes().strip(_BYTE[old]):
            self._explain(evicted, old)
        self._state[slots] = new
        self.num_free = 0
        self._counts[_FREE] = 0
        self._counts[old] -= total - num_free
        self._counts[new] += total
        return slots

    def free(self, slots: Slots, old: SlotState) -> None:
        """Give back `slots`, all of which must be in state `old`, in one batch."""
        count = len(slots)
        if not count:
            return
        if count == 1 and self._free_one(slots.item(0), old):
            return
        self._require(slots, count, old)
        self._state[slots] = _FREE
        self._free[self.num_free : self.num_free + count] = slots
        self.num_free += count
        self._counts[old] -= count
        self._counts[_FREE] += count

    def _free_one(self, slot: int, old: SlotState) -> bool:
        """Free what most sequences give back, the block they did not fill, in half the time.

        False, and nothing is changed, if it is not a slot in state `old`.
        """
        if not 0 <= slot < self.num_slots or self._state.item(slot) != old:
            return False
        self._state[slot] = _FREE
        self._free[self.num_free] = slot
        self.num_free += 1
        self._counts[old] -= 1
        self._counts[_FREE] += 1
        return True

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
        states = self._state[: self.num_slots]
        if np.bincount(states, minlength=len(SlotState)).tolist() != self._counts:
            raise InvariantError("the count of a slot state is wrong")

    def _require(self, slots: Slots, count: int, state: SlotState) -> None:
        """Raise unless every slot exists, is in `state`, and is named once."""
        try:
            found = self._state[slots]
        except IndexError as exc:
            raise InvariantError(f"a slot is outside the pool of {self.num_slots}") from exc
        # What is left of the bytes without those of the state: the fastest way to compare all.
        if found.tobytes().strip(_BYTE[state]):
            self._explain(slots, state)
        if count > 1 and not self._is_each_once(slots, count):
            raise InvariantError("a slot is named twice in one batch")

    def _is_each_once(self, slots: Slots, count: int) -> bool:
        if count <= _FEW:
            return len(set(slots.tolist())) == count
        if count > self.num_slots:
            return False
        # Where two entries name one slot, the later ordinal is in both places.
        self._mark[slots] = self._ordinal[:count]
        return self._ordinals.startswith(self._mark[slots].tobytes())

    def _explain(self, slots: Slots, state: SlotState) -> None:
        wrong = slots[self._state[slots] != state]
        if self._state[wrong[0]] == _OUTSIDE:
            raise InvariantError(f"slot {wrong[0]} is outside the pool of {self.num_slots}")
        actual = SlotState(int(self._state[wrong[0]])).name
        raise InvariantError(
            f"slot {wrong[0]} is {actual}, not {state.name} ({len(wrong)} of {len(slots)} wrong)"
        )
