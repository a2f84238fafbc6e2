"""The KV pool's blocks, for links: as plain bytes where they are read and written in place."""

from headwater.device.kv import KVPool
from headwater.types import Slots


class DeviceBlocks:
    """The slots of a pool, wherever it is."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.block_bytes = pool.block_bytes

    def mark_written(self, slots: Slots) -> None:
        """Bytes have landed in `slots`; called from the loop's thread."""
        self._pool.mark_written(slots)


class PoolBlocks(DeviceBlocks):
    """The memory behind the slots of a pool that is in main memory."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        flat = pool.blocks.numpy()
        self._views = [memoryview(row) for row in flat]
        self.memory: memoryview = flat.reshape(-1).data
        """All of it, for a link that registers memory as a whole."""

        self.file = None if pool.pages is None else pool.pages.file

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot, in place."""
        return self._views[slot]
