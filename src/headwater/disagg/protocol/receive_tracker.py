"""Which blocks of a lease have been received, and whether they are complete."""


class ReceiveTracker:
    """Blocks [0, num_blocks) of a lease. Pure."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * block_bytes
        """Bytes expected in total."""
        self._block_bytes = block_bytes
        self._received: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every block has been received."""
        return self.num_received == self.num_blocks

    @property
    def num_received(self) -> int:
        """Number of blocks received."""
        return len(self._received)

    def add(self, index: int, num_bytes: int) -> None:
        """Note a received block. A short one, or one outside the lease, does not count."""
        if num_bytes == self._block_bytes and 0 <= index < self.num_blocks:
            self._received.add(index)

    def is_exact(self, num_bytes: int, blocks: frozenset[int]) -> bool:
        """Whether the link's final byte count and blocks are exactly the expected ones."""
        return num_bytes == self.num_bytes and blocks == frozenset(range(self.num_blocks))

    def num_leading(self, blocks: frozenset[int]) -> int:
        """Number of complete blocks before the first one that is missing."""
        whole = blocks & self._received
        return next((at for at in range(self.num_blocks) if at not in whole), self.num_blocks)
