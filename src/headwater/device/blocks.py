"""The blocks of the KV pool, for links: as plain bytes if links read and write them in
place."""

from headwater.device.kv import KVPool
from headwater.types import Slots


class DeviceBlocks:
    """The slots of a pool, on any device."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.block_bytes = pool.block_bytes

    def mark_written(self, slots: Slots) -> None:
        """Record that a link or copy wrote to `slots`. Called from the loop's thread."""
        self._pool.mark_written(slots)


class PoolBlocks(DeviceBlocks):
    """The memory behind the slots of a pool that is in main memory."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        flat = pool.blocks.numpy()
        self._views = [memoryview(row) for row in flat]
        self.memory: memoryview = flat.reshape(-1).data
        """All of it, for a link that registers the whole memory."""

        self.file = None if pool.pages is None else pool.pages.file

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot, in place."""
        return self._views[slot]
