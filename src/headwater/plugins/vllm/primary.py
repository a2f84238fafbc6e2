"""The CPU memory of vLLM's primary tier, as a slab whose slots are vLLM's chunks."""

import numpy as np

from headwater.errors import ConfigError
from headwater.transfer.slab import HostSlab


class PrimaryMemory(HostSlab):
    """A host slab in memory that vLLM owns. Call `release` before vLLM unmaps the memory."""

    def __init__(self, view: memoryview) -> None:
        """`view` has a row for each chunk; `SecondaryTierManager` gets it from vLLM."""
        if view.ndim != 2 or view.shape is None or not view.c_contiguous:
            raise ConfigError(
                f"vLLM's primary tier must be a contiguous view of rows, got shape {view.shape}"
            )
        self.memory = view.cast("B")
        self.num_slots = view.shape[0]
        self.block_bytes = self.slot_bytes = len(self.memory) // max(self.num_slots, 1)
        self.file = None
        self.rows = np.frombuffer(self.memory, dtype=np.uint8).reshape(self.num_slots, -1)

    def release(self) -> None:
        """Drop all views; a hanging call keeps its view until it ends. Calling it
        twice is safe."""
        if "rows" in vars(self):
            del self.rows
        try:
            self.memory.release()
        except BufferError:
            return  # a call that never returned still has a view of a part
