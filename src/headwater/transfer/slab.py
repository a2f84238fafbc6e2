"""Host memory for blocks: one mapping, divided into slots that start on a page.

The system allocates a page when it is first written, so a slab of any size opens at once.
"""

import mmap
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headwater.errors import ConfigError, InvariantError
from headwater.transfer.shared import SharedPages, map_writable

PAGE_BYTES = mmap.PAGESIZE


class HostSlab:
    """The bytes of all host blocks, addressed by slot. The cache decides which block is in
    which slot."""

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        *,
        shared: bool = False,
        for_ranks: bool = False,
        memory: memoryview | None = None,
        file: int | None = None,
    ) -> None:
        """A `shared` slab can be passed to peers on this machine. Its slots have no gaps, so
        they start on a page only if blocks are whole pages. Other ranks of this engine can map
        a slab made with `for_ranks`, until `seal`. If `memory` is given, it is used; `file` is
        its descriptor, for ranks."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.is_shared = shared
        self.slot_bytes = block_bytes if shared else slot_bytes(block_bytes)
        total = max(num_slots * self.slot_bytes, PAGE_BYTES)
        self._pages: SharedPages | None = None
        self._rank_file = file
        if memory is None and (shared or for_ranks):
            self._pages = SharedPages(total, sealed=not for_ranks)
            memory = self._pages.memory
        self.file = self._pages.file if self._pages is not None and shared else None
        """A descriptor of the same bytes, for peers; None if the memory is private."""
        self.memory = _map(total) if memory is None else memory
        """The whole memory, for libraries that must register it."""
        whole: NDArray[np.uint8] = np.frombuffer(self.memory, dtype=np.uint8)
        slots = whole[: num_slots * self.slot_bytes].reshape(num_slots, self.slot_bytes)
        self.rows = slots[:, :block_bytes]
        """`[slots, block_bytes]`; a row is one contiguous block."""

    @classmethod
    def mapped(
        cls, file: int, num_slots: int, block_bytes: int, *, shared: bool = False
    ) -> "HostSlab":
        """The slab of rank 0, mapped in another rank."""
        each = block_bytes if shared else slot_bytes(block_bytes)
        memory = map_writable(file, max(num_slots * each, PAGE_BYTES))
        return cls(num_slots, block_bytes, shared=shared, memory=memory)

    @property
    def rank_file(self) -> int:
        """A descriptor of the bytes of a slab made `for_ranks`."""
        if self._rank_file is not None:
            return self._rank_file
        if self._pages is None:
            raise InvariantError("this slab was not made for ranks")
        return self._pages.file

    def seal(self) -> None:
        """Prevent other processes from mapping the memory writable."""
        if self._pages is not None:
            self._pages.seal()

    def view(self, slot: int) -> memoryview:
        """The bytes of one block, in place."""
        start = slot * self.slot_bytes
        return self.memory[start : start + self.block_bytes]

    def views(self, slots: Iterable[int]) -> list[memoryview]:
        """The bytes of each of `slots`, in place."""
        return [self.view(slot) for slot in slots]


def _map(num_bytes: int) -> memoryview:
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise ConfigError(
            f"a host tier of {num_bytes / (1 << 30):.1f} GiB cannot be allocated: {exc}; lower --swap-space"
        ) from exc
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def slot_bytes(block_bytes: int) -> int:
    """Memory of one slot: a block, rounded up to a page."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
