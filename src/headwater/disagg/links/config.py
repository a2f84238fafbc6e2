"""Settings of links, and limits on what a peer can make a link do."""

from dataclasses import dataclass

from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Settings of all links of one instance."""

    token: bytes
    """The secret that all instances of a deployment share."""

    host: str = "127.0.0.1"
    port: int = 0
    """Address that the receiver listens on; port 0 takes a free one."""

    advertised_host: str | None = None
    advertised_port: int | None = None
    """Address that is told to senders, if it differs from the one to listen on."""

    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    """PEM files for mutual TLS on the `tcp` link; without them blocks are not encrypted."""

    frame_bytes: int = 4 << 20
    """Bytes that the Transfer Engine writes at once if blocks are smaller, because small
    transfers are slow. The other links have their own sizes."""

    num_cells: int = 4
    """Frames that may be in flight between two Transfer Engines."""

    max_senders: int = 16
    """Maximum number of authenticated connections of a receiver."""

    connect_timeout_s: float = 2.0
    """Longest wait for a connection, and for its handshake."""

    stall_timeout_s: float = 10.0
    """A peer that sends no byte for this long in the middle of a frame is disconnected."""

    mooncake_protocol: str = "tcp"
    """`tcp` or `rdma`, for the Transfer Engine."""

    mooncake_devices: str = ""
    """RDMA devices, separated by commas; empty lets Mooncake choose."""

    def __post_init__(self) -> None:
        if not self.token:
            raise ConfigError(
                "links need a token that all instances share; set HEADWATER_PEER_TOKEN"
            )
        if min(self.frame_bytes, self.num_cells, self.max_senders) < 1:
            raise ConfigError(
                "frame_bytes, num_cells and max_senders must be at least 1, got "
                f"{self.frame_bytes}, {self.num_cells} and {self.max_senders}"
            )
        if min(self.connect_timeout_s, self.stall_timeout_s) <= 0:
            raise ConfigError(
                "connect_timeout_s and stall_timeout_s must be positive, got "
                f"{self.connect_timeout_s} and {self.stall_timeout_s}"
            )

    @property
    def reachable_host(self) -> str:
        """Host that senders connect to."""
        return self.advertised_host or self.host

    def cell_bytes(self, block_bytes: int) -> int:
        """Size of a staging cell, which is the largest payload of a frame: at least one block."""
        return max(self.frame_bytes, block_bytes)
