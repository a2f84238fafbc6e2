"""What every link needs to know, and the limits of what a peer may make it do."""

from dataclasses import dataclass

from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Settings of all links of one instance."""

    token: bytes
    """The secret that all instances of a deployment share."""

    host: str = "127.0.0.1"
    """Where receivers listen, and the name under which peers reach them."""

    port: int = 0
    """Of the `tcp` receiver; 0 takes a free one."""

    frame_bytes: int = 4 << 20
    """Payload that a Transfer Engine writes in one go, where blocks are smaller: small transfers
    are slow ones. The other links have sizes of their own."""

    num_cells: int = 4
    """Frames that may be on their way between two Transfer Engines at once."""

    max_senders: int = 16
    """Connections that a receiver serves at once."""

    connect_timeout_s: float = 2.0
    """Longest wait for a connection, and for each word of its greeting."""

    stall_timeout_s: float = 10.0
    """How long a peer may stop in the middle of a frame before it is cut off."""

    mooncake_protocol: str = "tcp"
    """`tcp` or `rdma`, for the Transfer Engine."""

    mooncake_devices: str = ""
    """RDMA devices, with commas between; empty lets Mooncake choose."""

    def __post_init__(self) -> None:
        if not self.token:
            raise ConfigError("links need a token that all instances share")
        if min(self.frame_bytes, self.num_cells, self.max_senders) < 1:
            raise ConfigError("frame_bytes, num_cells and max_senders must be positive")
        if min(self.connect_timeout_s, self.stall_timeout_s) <= 0:
            raise ConfigError("the timeouts of a link must be positive")

    def cell_bytes(self, block_bytes: int) -> int:
        """The largest payload of a frame: never less than a block."""
        return max(self.frame_bytes, block_bytes)
