"""The slots of one tier, the state of each, and the eviction order of the tier.

Slots are changed in arrays, never in a loop over slots.

    FREE --take--> HELD --commit--> CACHED --evict--> FREE
    FREE --take--> MOVING --finish--> CACHED, or FREE when the copy failed
                   MOVING --time out--> QUARANTINED --quiet--> FREE
                   CACHED --evict while a write reads it--> QUARANTINED --end_read--> FREE

Every change names the state it expects. A slot that is in another state, or is named twice in
one batch, breaks an invariant; that is detected here, before anything is changed.

`headwater.native.slot_pool` has the operations in C, which take a fifth of the time. A tier uses
them if that module was prepared before.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from headwater.cache.node import Node
from headwater.cache.policy import EvictionPolicy
from headwater.errors import CacheUseError, InvariantError
from headwater.native import slot_pool
from headwater.types import EMPTY, Slots, Tier


class SlotState(IntEnum):
    """What a slot is used for. Each slot is in exactly one state."""

    FREE = 0
    HELD = 1
    """One sequence is filling it; its block is not findable."""

    CACHED = 2
    """A node of the tree owns it."""

    MOVING = 3
    """Target of a transfer in flight; its block is not findable."""

    QUARANTINED = 4
    """Not in use, but an executor may still write to it or read from it."""


_FREE = SlotState.FREE
_QUARANTINED = SlotState.QUARANTINED
_BYTE = [bytes([state]) for state in SlotState]
"""Each state as the byte that represents it in the array of states."""

_FEW = 8
"""Up to this many slots, a Python set finds duplicates faster than numpy."""

_OUTSIDE = 255
"""State of the padding entries: an index that is not a slot."""


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
    """A fixed set of slots, each in one state; taking or freeing n slots is one operation.

    Invariant: the free stack contains each slot in state FREE once and no other slot, and the
    count of each state is correct. `check()` verifies it.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            self.refuse(num_slots)
        self.num_slots = num_slots
        self.num_free = num_slots
        # A stack: the free slots are _free[:num_free], the next one to take is the last.
        self._free = np.arange(num_slots, dtype=np.int64)
        # numpy accepts negative indices and counts them from the end. The array has twice the
        # length, so that indices -num_slots to -1 find _OUTSIDE instead of another slot's state.
        self._state = np.full(2 * num_slots, _OUTSIDE, dtype=np.uint8)
        self._state[:num_slots] = SlotState.FREE
        # Scratch memory to find a slot that is named twice in one batch.
        self._mark = np.zeros(num_slots, dtype=np.int32)
        self._ordinal = np.arange(num_slots, dtype=np.int32)
        self._ordinals = self._ordinal.tobytes()
        self._counts = [num_slots, 0, 0, 0, 0]
        self._readers = np.zeros(num_slots, dtype=np.int32)
        """How many writes to storage are reading each slot."""
        self.num_reads = 0
        """Sum of `_readers`; while it is 0, `free` need not look at the array."""
        self.num_lost_reads = 0
        """How many of the reads in `num_reads` belong to writes that timed out."""

    def take(self, count: int, state: SlotState = SlotState.HELD) -> Slots | None:
        """Move `count` free slots to `state`, or change nothing and return None."""
        if count < 0:
            self.refuse(count)
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

    def claim(self, slots: Slots, state: SlotState) -> None:
        """Move these free slots to `state`. O(slots of the pool): for the start of an engine."""
        self._require(slots, len(slots), SlotState.FREE)
        self._state[slots] = state
        free = self._free[: self.num_free]
        left = free[self._state[free] == _FREE]
        self._free[: len(left)] = left
        self.num_free = len(left)
        self._counts[_FREE] -= len(slots)
        self._counts[state] += len(slots)

    def move(self, slots: Slots, old: SlotState, new: SlotState) -> None:
        """Change the state of `slots`, all of which must be in state `old`."""
        count = len(slots)
        # A single slot, as in the commit of one block, is handled without an array: ten times
        # as fast.
        if count != 1 or not 0 <= (slot := slots.item(0)) < self.num_slots:
            self._require(slots, count, old)
            self._state[slots] = new
        elif self._state.item(slot) == old:
            self._state[slot] = new
        else:
            self.explain(slots, old)
        self._counts[old] -= count
        self._counts[new] += count

    def reuse(self, parts: list[Slots], old: SlotState, new: SlotState) -> Slots:
        """Free the slots of `parts`, all in state `old`, and take them and all free slots.

        An eviction needs exactly this: slots change owner in one batch. Duplicates were ruled
        out when the slots entered the tree and the free stack. For the device tier only: slots
        that a write to storage reads must go through `free`.
        """
        num_free = self.num_free
        if num_free:
            parts = [self._free[:num_free], *parts]
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        total = len(slots)
        if total == 1 and not num_free:
            self.move(slots, old, new)
            return slots
        evicted = slots[num_free:] if num_free else slots
        if self._state[evicted].tobytes().strip(_BYTE[old]):
            self.explain(evicted, old)
        self._state[slots] = new
        self.num_free = 0
        self._counts[_FREE] = 0
        self._counts[old] -= total - num_free
        self._counts[new] += total
        return slots

    def free(self, slots: Slots, old: SlotState) -> None:
        """Give back `slots`, all of which must be in state `old`, in one batch.

        A slot that is being read becomes QUARANTINED instead, until the read ends.
        """
        count = len(slots)
        if not count:
            return
        self._require(slots, count, old)
        if self.num_reads:
            is_read = self._readers[slots] > 0
            if is_read.any():
                self.move(slots[is_read], old, _QUARANTINED)
                slots = slots[~is_read]
                count = len(slots)
        self._state[slots] = _FREE
        self._free[self.num_free : self.num_free + count] = slots
        self.num_free += count
        self._counts[old] -= count
        self._counts[_FREE] += count

    def begin_read(self, slots: Slots) -> None:
        """An executor reads these cached slots of one node: they must not be reused before
        `end_read`. The tree names each slot once, so this method does not check for
        duplicates."""
        if self._state[slots].tobytes().strip(_BYTE[SlotState.CACHED]):
            self.explain(slots, SlotState.CACHED)
        self._readers[slots] += 1
        self.num_reads += len(slots)

    def lose_read(self, slots: Slots) -> None:
        """Count slots whose reader did not end in time; that executor may still read them."""
        self.num_lost_reads += len(slots)

    def end_read(self, slots: Slots, was_lost: bool = False) -> None:
        """End a read of `begin_read`. Slots that lost their block meanwhile become free."""
        left = self._readers[slots] - 1
        self._readers[slots] = left
        self.num_reads -= len(slots)
        if was_lost:
            self.num_lost_reads -= len(slots)
        if self._counts[_QUARANTINED]:
            unused = (left == 0) & (self._state[slots] == _QUARANTINED)
            self.free(slots[unused], _QUARANTINED)

    def has_lost_read(self, slots: Slots) -> bool:
        """Whether an executor that did not end in time may read one of `slots`, none of which is
        part of a job in flight."""
        return self.num_lost_reads > 0 and bool((self._readers[slots] > 0).any())

    def joined(self, parts: list[Slots]) -> Slots:
        """One array of all parts; a single part is not copied."""
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else EMPTY

    def stats(self) -> PoolStats:
        """How many slots are in each state now."""
        free, held, cached, moving, quarantined = self.counts()
        return PoolStats(
            total=self.num_slots,
            free=free,
            held=held,
            cached=cached,
            moving=moving,
            quarantined=quarantined,
        )

    def counts(self) -> tuple[int, ...]:
        """How many slots are in each state, by the number of the state."""
        return tuple(self._counts)

    def states(self) -> NDArray[np.uint8]:
        """The state of each slot; for checks."""
        return self._state[: self.num_slots]

    def free_slots(self) -> Slots:
        """The free stack; for checks."""
        return self._free[: self.num_free]

    def readers(self) -> NDArray[np.int32]:
        """How many executors read each slot; for checks."""
        return self._readers

    def owned(self, state: SlotState) -> Slots:
        """Every slot in `state`, ascending. O(slots): for checks and tests."""
        return np.flatnonzero(self.states() == state)

    @property
    def array_bytes(self) -> int:
        """Bytes of the arrays that describe the slots: 8 for the free stack, 1 for the state and 4
        for the readers of each."""
        return 13 * self.num_slots

    def check(self) -> None:
        """Raise InvariantError if the stack, the states and the counts disagree."""
        free, states, readers = self.free_slots(), self.states(), self.readers()
        if len(np.unique(free)) != self.num_free:
            raise InvariantError("a slot is in the free stack twice")
        if not np.array_equal(np.sort(free), self.owned(SlotState.FREE)):
            raise InvariantError("the free stack and the slot states disagree")
        if tuple(np.bincount(states, minlength=len(SlotState)).tolist()) != self.counts():
            raise InvariantError("the count of a slot state is wrong")
        if readers.sum() != self.num_reads or readers.min(initial=0) < 0:
            raise InvariantError("the number of slots being read is wrong")
        if not 0 <= self.num_lost_reads <= self.num_reads:
            raise InvariantError("the number of slots of lost reads is wrong")

    def refuse(self, count: int) -> NoReturn:
        """Raise the error for a negative number of slots."""
        raise CacheUseError(f"the number of slots cannot be negative, got {count}")

    def explain(self, slots: Slots, state: int) -> NoReturn:
        """Raise the error for `slots`, which are not all in `state` or not all different."""
        outside = slots[(slots < 0) | (slots >= self.num_slots)]
        if len(outside):
            raise InvariantError(f"slot {outside[0]} is outside the pool of {self.num_slots}")
        states = self.states()[slots]
        wrong = np.flatnonzero(states != state)
        if not len(wrong):
            raise InvariantError("a slot is named twice in one batch")
        slot, actual = slots[wrong[0]], SlotState(int(states[wrong[0]])).name
        raise InvariantError(
            f"slot {slot} is {actual}, not {SlotState(state).name} "
            f"({len(wrong)} of {len(slots)} wrong)"
        )

    def _require(self, slots: Slots, count: int, state: SlotState) -> None:
        """Raise unless every slot exists, is in `state`, and is named once."""
        try:
            found = self._state[slots]
        except IndexError:
            self.explain(slots, state)
        # Strip the expected byte from both ends: anything left is a slot in another state. This
        # is the fastest comparison of all bytes with one value.
        if found.tobytes().strip(_BYTE[state]) or (
            count > 1 and not self._is_each_once(slots, count)
        ):
            self.explain(slots, state)

    def _is_each_once(self, slots: Slots, count: int) -> bool:
        if count <= _FEW:
            return len(set(slots.tolist())) == count
        if count > self.num_slots:
            return False
        # Write 0, 1, 2 … to the named slots and read them back. Where two entries name one
        # slot, the first reads back the ordinal of the second.
        self._mark[slots] = self._ordinal[:count]
        return self._ordinals.startswith(self._mark[slots].tobytes())


def _make_slot_pool(num_slots: int) -> SlotPool:
    """A pool in native code if that was prepared, else one in Python."""
    native = slot_pool.pool_type()
    return SlotPool(num_slots) if native is None else native_class(native)(num_slots)


@cache
def native_class(native: type) -> type[SlotPool]:
    """The pool class with the operations of the native type."""

    class NativeSlotPool(native, SlotPool):  # type: ignore[misc]  # known at run time only
        """A `SlotPool` with the operations of the native type, which come first in the order of
        bases."""

        __slots__ = ()

        def __init__(self, num_slots: int) -> None:
            """Does nothing: the native type is complete after its construction."""

    return NativeSlotPool


class TierPool:
    """Slots and eviction order of the device or the host tier."""

    __slots__ = ("duplicates", "evictable", "evicted", "order", "pool", "tier")

    def __init__(self, tier: Tier, num_slots: int, order: EvictionPolicy) -> None:
        self.tier = tier
        self.pool = _make_slot_pool(num_slots)
        self.order = order
        self.evictable = 0
        """Blocks of the nodes in the order."""
        self.duplicates: dict[Node, None] = {}
        """In the host tier: nodes in the order whose host blocks are also on the device and are
        not evicted there soon. They leave a full host tier first; see `EvictionWindow`."""
        self.evicted = 0
        """Blocks evicted from this tier since the start."""

    def blocks(self, node: Node) -> int:
        """Blocks of `node` in this tier."""
        return len(node.device if self.tier is Tier.DEVICE else node.host)

    def add(self, node: Node, now: float, *, cold: bool = False) -> None:
        """Make `node` evictable: last in the order, or first when `cold`."""
        if cold:
            self.order.add_cold(node, now)
        else:
            self.order.add(node, now)
        self.evictable += self.blocks(node)

    def discard(self, node: Node) -> None:
        """Take `node` out of the order: it must not be evicted now."""
        self.order.discard(node)
        self.duplicates.pop(node, None)
        self.evictable -= self.blocks(node)

    def mark_duplicate(self, node: Node) -> None:
        """Mark `node` as a duplicate if all its host blocks are on the device and it is in the
        order."""
        if 0 < len(node.host) <= len(node.device) and node in self.order:
            self.duplicates[node] = None
