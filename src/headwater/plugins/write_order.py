"""The order of writes to storage: blocks most likely to be used again come first.

Storage often accepts less than an engine computes. Then the order decides what is found later:

1. blocks of prefixes that were asked for before, more often first;
2. among them the start of a prompt before its end: a block is of no use without those before it;
3. then the newest.

Blocks above the bound are dropped from the end of this order and counted.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

MAX_SEEN = 1 << 17
"""Number of keys whose uses are remembered."""


class _Waiting(NamedTuple):
    """Blocks that wait; sorted by the first three fields, least likely to be used again
    first."""

    uses: int
    depth: int
    number: int
    num_blocks: int

    def __lt__(self, other: tuple[object, ...]) -> bool:
        return tuple(self[:3]) < tuple(other[:3])


class WriteOrder(Generic[T]):
    """Waiting writes of at most `max_blocks` blocks. Belongs to one thread."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._waiting: list[_Waiting] = []
        """Sorted; the last one is written first."""
        self._items: dict[int, T] = {}
        self._last = 0
        self.num_blocks = 0
        self.num_dropped = 0
        """Blocks that were dropped because too many waited."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, *, count: int, uses: int, position: int) -> list[T]:
        """Add `count` waiting blocks. The first is block `position` of its prompt; its prefix
        was requested `uses` times. Returns the items that are dropped, possibly this one."""
        self._last += 1
        insort(self._waiting, _Waiting(uses, -position, self._last, count))
        self._items[self._last] = item
        self.num_blocks += count
        dropped = []
        while self.num_blocks > self._max_blocks and self._waiting:
            worst = self._waiting.pop(0)
            self.num_dropped += worst.num_blocks
            dropped.append(self._remove(worst))
        return dropped

    def pop(self) -> T | None:
        """The most valuable item, or None."""
        return self._remove(self._waiting.pop()) if self._waiting else None

    def clear(self) -> list[T]:
        """Remove and return all items, in any order."""
        items = list(self._items.values())
        self._waiting.clear()
        self._items.clear()
        self.num_blocks = 0
        return items

    def check(self) -> None:
        """Raise AssertionError unless the bound holds and the counts agree."""
        assert (
            self.num_blocks == sum(one.num_blocks for one in self._waiting) <= self._max_blocks
        )
        assert len(self._items) == len(self._waiting)

    def _remove(self, waiting: _Waiting) -> T:
        self.num_blocks -= waiting.num_blocks
        return self._items.pop(waiting.number)


class UseCounts:
    """How often keys were requested recently; the oldest are forgotten."""

    def __init__(self, max_keys: int = MAX_SEEN) -> None:
        self._max_keys = max_keys
        self._counts: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def record(self, keys: Iterable[Hashable]) -> None:
        """A request used these keys."""
        counts = self._counts
        for key in keys:
            counts[key] = counts.pop(key, 0) + 1
        while len(counts) > self._max_keys:
            counts.popitem(last=False)

    def of(self, key: Hashable) -> int:
        """How often `key` was requested."""
        return self._counts.get(key, 0)
