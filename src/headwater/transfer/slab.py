"""Host memory for blocks: one mapping, cut into slots that start on a page.

The system gives a page when it is first written, so a slab of any size opens at once.
"""

import mmap
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headwater.errors import ConfigError
from headwater.transfer.shared import SharedPages

PAGE_BYTES = mmap.PAGESIZE


class HostSlab:
    """Bytes of every host block, addressed by slot; who has which slot is decided elsewhere."""

    def __init__(self, num_slots: int, block_bytes: int, *, shared: bool = False) -> None:
        """A `shared` one can be handed to peers on this machine; its slots have no gaps between
        them, so they start on a page only where blocks are whole pages."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.slot_bytes = block_bytes if shared else slot_bytes(block_bytes)
        total = max(num_slots * self.slot_bytes, PAGE_BYTES)
        self._pages = SharedPages(total) if shared else None
        self.file = None if self._pages is None else self._pages.file
        """A descriptor of the same bytes, for peers; None where they are private."""
        self.memory = _map(total) if self._pages is None else self._pages.memory
        """All of it, for whoever has to register it."""
        whole: NDArray[np.uint8] = np.frombuffer(self.memory, dtype=np.uint8)
        slots = whole[: num_slots * self.slot_bytes].reshape(num_slots, self.slot_bytes)
        self.rows = slots[:, :block_bytes]
        """`[slots, block_bytes]`; a row is one contiguous block."""

    def view(self, slot: int) -> memoryview:
        """The bytes of one block, in place."""
        start = slot * self.slot_bytes
        return self.memory[start : start + self.block_bytes]

    def views(self, slots: Iterable[int]) -> list[memoryview]:
        """The same for each of `slots`."""
        return [self.view(slot) for slot in slots]


def _map(num_bytes: int) -> memoryview:
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise ConfigError(
            f"a host tier of {num_bytes / (1 << 30):.1f} GiB is more memory than there is: {exc}"
        ) from exc
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def slot_bytes(block_bytes: int) -> int:
    """Memory that one slot takes: a block, up to the next page."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
