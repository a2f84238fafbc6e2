"""The KV pool's blocks as plain bytes, for links that read and write them in place."""

import torch

from headwater.device.kv import KVPool
from headwater.errors import ConfigError
from headwater.types import Slots


class PoolBlocks:
    """The memory behind the slots of a pool that is in main memory."""

    def __init__(self, pool: KVPool) -> None:
        if pool.device.type != "cpu":
            raise ConfigError(
                f"--splitwise-role: hand-offs from {pool.device} are not in this release"
            )
        self._pool = pool
        flat = pool.data.view(pool.num_blocks, -1).view(torch.uint8).numpy()
        self._views = [memoryview(row) for row in flat]
        self.block_bytes = int(flat.shape[1])
        self.memory: memoryview = flat.reshape(-1).data
        """All of it, for a link that registers memory as a whole."""

        self.file = None if pool.pages is None else pool.pages.file

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot, in place."""
        return self._views[slot]

    def mark_written(self, slots: Slots) -> None:
        """Bytes have landed in `slots`; called from the loop's thread."""
        self._pool.mark_written(slots)
