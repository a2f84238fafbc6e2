"""The index of the file backend: where each block is. In memory, thread-safe, without I/O.

A block in our own slabs is findable, being read (leased: its slot is not reused), or being
written (claimed: not findable yet). A slot of our own slabs is free, has a findable block, or
is taken by one writer. Of blocks in other processes' slabs only the position is known.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import NamedTuple

from headwater.storage.file.slab import Slab
from headwater.storage.file.table import Entry
from headwater.types import BlockKey


class SlotEntry(NamedTuple):
    """A slot of a slab, and the block that is in it or will be written to it."""

    slab: Slab
    entry: Entry


class SlotIndex:
    """Finds blocks by key, and chooses the slot of the next block."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ours: OrderedDict[BlockKey, SlotEntry] = (
            OrderedDict()
        )  # least recently used first
        self._theirs: dict[BlockKey, SlotEntry] = {}
        self._their_keys: dict[tuple[int, int], BlockKey] = {}
        # First in, first out, so that the blocks of a run are next to each other.
        self._free: deque[tuple[Slab, int]] = deque()
        self._leases: Counter[tuple[int, int]] = Counter()
        self._doomed: set[tuple[int, int]] = set()
        self._claimed: set[BlockKey] = set()
        self._slabs: list[Slab] = []
        self._sequence = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in our own slabs."""
        return len(self._ours)

    def has_free(self) -> bool:
        """Whether a slot is free without evicting."""
        return bool(self._free)

    @property
    def names(self) -> set[str]:
        """Our own slabs, by name."""
        return {slab.table.path.stem for slab in self.slabs}

    @property
    def slabs(self) -> list[Slab]:
        """Our own slabs."""
        return list(self._slabs)

    def add_slab(self, slab: Slab) -> list[SlotEntry]:
        """Add a slab that was created or taken over: its blocks become findable, its free slots
        usable.

        Another process may have written blocks that we also have. Those copies are returned.
        The caller first clears them in the table, so that they are not found again, and then
        calls `abandon`. In the other order, another thread could write to the slot before it is
        cleared.
        """
        entries = sorted(slab.table.entries(), key=lambda entry: entry.sequence)
        used = {entry.slot for entry in entries}
        copies = []
        with self._lock:
            self._slabs.append(slab)
            self._free.extend(
                (slab, slot) for slot in range(slab.geometry.num_slots) if slot not in used
            )
            for entry in entries:
                self._sequence = max(self._sequence, entry.sequence)
                if entry.key in self._ours:
                    copies.append(SlotEntry(slab, entry))
                else:
                    self._ours[entry.key] = SlotEntry(slab, entry)
            parents = {entry.parent for entry in entries}
            for entry in entries:
                if entry.key not in parents:
                    self._touch(entry.key)
        return copies

    def learn(self, slab: Slab, changes: Iterable[tuple[int, Entry | None]]) -> None:
        """Apply changes in another process's slab."""
        with self._lock:
            for slot, entry in changes:
                self._unlearn((id(slab), slot))
                if entry is not None:
                    self._theirs[entry.key] = SlotEntry(slab, entry)
                    self._their_keys[id(slab), slot] = entry.key

    def unlearn(self, slab: Slab) -> None:
        """Forget a slab of another process that is gone, or that belongs to us now."""
        with self._lock:
            for slot in range(slab.geometry.num_slots):
                self._unlearn((id(slab), slot))

    def found(self, keys: Sequence[BlockKey]) -> list[bool]:
        """For each key, whether it can be found in any slab."""
        with self._lock:
            return [key in self._ours or key in self._theirs for key in keys]

    def our_keys(self) -> list[BlockKey]:
        """Keys in our own slabs, least recently used first."""
        with self._lock:
            return list(self._ours)

    def all_ours(self, keys: Sequence[BlockKey]) -> bool:
        """Whether all of these keys are in our own slabs, so that other processes do not
        matter."""
        with self._lock:
            return all(key in self._ours for key in keys)

    def lease(self, key: BlockKey) -> SlotEntry | None:
        """The position of a block. A slot of our own slabs is not reused until `release`."""
        with self._lock:
            place = self._ours.get(key)
            if place is None:
                return self._theirs.get(key)
            self._leases[_name(place)] += 1
            return place

    def release(self, place: SlotEntry) -> None:
        """End a lease."""
        name = _name(place)
        with self._lock:
            if name in self._leases:
                self._leases[name] -= 1
                if not self._leases[name]:
                    del self._leases[name]
                    if name in self._doomed:
                        self._doomed.remove(name)
                        self._free.append((place.slab, place.entry.slot))

    def claim(self, key: BlockKey) -> bool:
        """Become the only writer of a block, unless it exists or has a writer."""
        with self._lock:
            if key in self._ours or key in self._theirs or key in self._claimed:
                return False
            self._claimed.add(key)
            return True

    def take(
        self, key: BlockKey, parent: BlockKey, *, evict: bool
    ) -> tuple[SlotEntry | None, bool]:
        """A slot for a claimed block, and whether another block was evicted for it."""
        with self._lock:
            evicted = False
            if not self._free and evict:
                evicted = self._evict()
            if not self._free:
                return None, False
            slab, slot = self._free.popleft()
            self._sequence += 1
            return SlotEntry(slab, Entry(slot, key, parent, self._sequence)), evicted

    def commit(self, place: SlotEntry) -> bool:
        """Make the block of a complete slot findable. Returns False if a slab that was taken
        over meanwhile has the same block: then this copy must be cleared and abandoned."""
        with self._lock:
            if place.entry.key in self._ours:
                return False
            self._ours[place.entry.key] = place
            return True

    def abandon(self, place: SlotEntry) -> None:
        """Free a slot whose block is not findable in it."""
        with self._lock:
            self._free.append((place.slab, place.entry.slot))

    def unclaim(self, key: BlockKey) -> None:
        """End the claim of a block that was committed, or that could not be written."""
        with self._lock:
            self._claimed.discard(key)

    def forget(self, place: SlotEntry) -> bool:
        """Make a block unfindable. Its slot becomes free when no reader is left. Returns False
        if the slot was not ours or had another block."""
        key, name = place.entry.key, _name(place)
        with self._lock:
            if self._theirs.get(key) == place:
                self._unlearn(name)
            if self._ours.get(key) != place:
                return False
            del self._ours[key]
            if name in self._leases:
                self._doomed.add(name)
            else:
                self._free.append((place.slab, place.entry.slot))
            return True

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Mark a run as used. Its last block becomes recent first, and its first block last, so
        that eviction takes leaves before their parents."""
        with self._lock:
            for key in reversed(keys):
                if key in self._ours:
                    self._ours.move_to_end(key)
            if keys:
                self._touch(keys[0])

    def clear(self) -> None:
        """Forget all blocks and slabs."""
        with self._lock:
            self._ours.clear()
            self._theirs.clear()
            self._their_keys.clear()
            self._free.clear()
            self._slabs.clear()

    def check(self) -> None:
        """Raise AssertionError unless every slot of ours is in one state."""
        with self._lock:
            found = [_name(place) for place in self._ours.values()]
            free = [(id(slab), slot) for slab, slot in self._free]
            held = len(self._claimed) + len(self._doomed)
            total = sum(slab.geometry.num_slots for slab in self._slabs)
            assert len(set(found + free)) == len(found) + len(free), "a slot has two states"
            assert 0 <= total - len(found) - len(free) <= held, "a slot is lost"

    def _unlearn(self, name: tuple[int, int]) -> None:
        key = self._their_keys.pop(name, None)
        if key is not None and _name(self._theirs[key]) == name:
            del self._theirs[key]

    def _touch(self, key: BlockKey) -> None:
        seen = 0
        while (place := self._ours.get(key)) is not None and seen <= len(self._ours):
            self._ours.move_to_end(key)
            key = place.entry.parent
            seen += 1

    def _evict(self) -> bool:
        for key, place in self._ours.items():
            if _name(place) not in self._leases:
                del self._ours[key]
                self._free.append((place.slab, place.entry.slot))
                return True
        return False


def _name(place: SlotEntry) -> tuple[int, int]:
    return id(place.slab), place.entry.slot
