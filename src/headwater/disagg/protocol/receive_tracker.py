"""What has landed of one lease, and whether that is all. The account, kept by the receiver."""


class ReceiveTracker:
    """Blocks [0, num_blocks) of a lease on their way into slots. Pure."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * block_bytes
        """Due in all."""
        self._block_bytes = block_bytes
        self._received: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every block was said to have landed."""
        return self.num_received == self.num_blocks

    @property
    def num_received(self) -> int:
        """Blocks that were said to have landed."""
        return len(self._received)

    def add(self, index: int, num_bytes: int) -> None:
        """A block landed. One that is short, or not of this lease, does not count."""
        if num_bytes == self._block_bytes and 0 <= index < self.num_blocks:
            self._received.add(index)

    def is_exact(self, num_bytes: int, blocks: frozenset[int]) -> bool:
        """Whether the final account of the link is the expected one, byte for byte."""
        return num_bytes == self.num_bytes and blocks == frozenset(range(self.num_blocks))

    def num_leading(self, blocks: frozenset[int]) -> int:
        """Blocks before the first that did not land whole."""
        whole = blocks & self._received
        return next((at for at in range(self.num_blocks) if at not in whole), self.num_blocks)
