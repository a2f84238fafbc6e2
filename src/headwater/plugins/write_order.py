"""The order of writes to storage: blocks most likely to be used again come first.

Storage often accepts less than an engine computes. Then the order decides what is found later. It is
the order of Headwater's own engine (`headwater.cache.storage_queue`):

1. prefixes that several prompts share;
2. blocks that were used most often;
3. the shortest prompts, and of one prompt its start: a block is of no use without those before it;
4. the oldest.

Blocks above the bound are dropped from the end of this order and counted.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from headwater.cache.storage_queue import MANY_USES, WriteLevel

T = TypeVar("T")

_MAX_SEEN = 1 << 17
"""Number of keys whose uses are remembered."""


class WriteRank(NamedTuple):
    """The place of some blocks in the order of writes: smallest first."""

    level: WriteLevel
    minus_uses: int
    """Minus the number of requests that had the blocks, the present one included."""

    end: int
    """Where the prompt ends, as far as it is known."""

    start: int
    """Where the blocks begin in the prompt."""


class _Waiting(NamedTuple):
    rank: WriteRank
    number: int
    """A number that grows with each entry: among equals, the oldest is first."""

    num_blocks: int


class WriteOrder(Generic[T]):
    """Waiting writes of at most `max_blocks` blocks. Belongs to one thread."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._waiting: list[_Waiting] = []
        """Sorted; the first is written first."""
        self._items: dict[int, T] = {}
        self._last = 0
        self.num_blocks = 0
        self.num_dropped = 0
        """Blocks that were dropped because too many waited."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, *, count: int, rank: WriteRank) -> list[T]:
        """Add `item`, which has `count` blocks. Returns the items that are dropped to keep the
        bound, perhaps `item` itself."""
        self._last += 1
        insort(self._waiting, _Waiting(rank, self._last, count))
        self._items[self._last] = item
        self.num_blocks += count
        dropped = []
        while self.num_blocks > self._max_blocks and self._waiting:
            worst = self._waiting.pop()
            self.num_dropped += worst.num_blocks
            dropped.append(self._remove(worst))
        return dropped

    def pop(self) -> T | None:
        """The most valuable item, or None."""
        return self._remove(self._waiting.pop(0)) if self._waiting else None

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


class _Use:
    """What finished requests have shown about one block."""

    __slots__ = ("is_shared", "next_key", "uses")

    def __init__(self) -> None:
        self.uses = 0
        self.next_key: Hashable = None
        """The block that followed it in a request; None if no block did."""
        self.is_shared = False
        """Whether different blocks followed it."""


class PrefixUses:
    """How often blocks were used recently, and which of them several prompts share."""

    def __init__(self, max_keys: int = _MAX_SEEN) -> None:
        self._max_keys = max_keys
        self._uses: OrderedDict[Hashable, _Use] = OrderedDict()
        """The least recently used first."""

    def __len__(self) -> int:
        return len(self._uses)

    def record(self, path: Sequence[Hashable]) -> None:
        """Record that a request with the blocks of `path` has finished."""
        before: _Use | None = None
        for key in path:
            use = self._uses.get(key)
            if use is None:
                use = self._uses[key] = _Use()
            else:
                self._uses.move_to_end(key)
            use.uses += 1
            if before is not None:
                before.is_shared |= before.next_key not in (None, key)
                before.next_key = key
            before = use
        while len(self._uses) > self._max_keys:
            self._uses.popitem(last=False)

    def rank(
        self, path: Sequence[Hashable], slices: Sequence[tuple[int, int]]
    ) -> list[tuple[WriteLevel, int]]:
        """The level, and minus the number of uses, of each slice of `path`, for a request that
        has not finished.

        A slice has the best rank of its own and later blocks, because these cannot be found
        without it.
        """
        best, at = (WriteLevel.OTHER, -1), len(path)
        ranks = []
        for start, _ in reversed(slices):
            while at > start:
                at -= 1
                follower = path[at + 1] if at + 1 < len(path) else None
                best = min(best, self._rank(path[at], follower))
            ranks.append(best)
        return ranks[::-1]

    def _rank(self, key: Hashable, follower: Hashable) -> tuple[WriteLevel, int]:
        use = self._uses.get(key)
        if use is None:
            return WriteLevel.OTHER, -1
        branches = follower is not None and use.next_key not in (None, follower)
        level = WriteLevel.SHARED if use.is_shared or branches else WriteLevel.OTHER
        return level, -min(use.uses + 1, MANY_USES)
